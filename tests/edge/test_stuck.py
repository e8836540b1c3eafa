"""``manage.py processors`` for operators: what is stuck, why, and what is done about it."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from django.utils import timezone

from tests.edge.manage import Install, Manage
from tests.edge.stuck import OF_ERRORS, another_session, claimed
from tests.edge.watchers import parcels
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)


def given_up() -> Errand:
    return Errand.objects.create(
        result="no route", attempts=2, last_error="OSError: no route", dead=True
    )


# --- status


def test_status_shows_what_waits_and_what_is_stuck(manage: Manage) -> None:
    parcels("", "")
    claimed()
    done = manage("status", "warehouse.deliver", "warehouse.fetch")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:8] == [
        "warehouse.deliver (transactional, database 'default')",
        "  pending         2",
        "  due now         2",
        "  due later       0",
        "  oldest pending  not recorded: set pending_since=…",
        "  in progress     not recorded: a TRANSACTIONAL worker only locks its row",
        "  in doubt        0",
        "  given up        0",
    ]
    assert lines[8] == "warehouse.fetch (at_most_once, database 'default')"
    assert lines[14] == "  in doubt        1"


def test_without_names_status_is_a_line_for_each_processor_troubles_first(manage: Manage) -> None:
    parcels("", "")
    claimed()
    head, first, *others = manage("status").out.splitlines()
    columns = "pending oldest in progress in doubt given up rows/s left state processor"
    assert head.split() == columns.split()
    assert first.split() == ["0", "-", "0", "1", "0", "-", "-", "in", "doubt", "warehouse.fetch"]
    names = [line.split()[-1] for line in others]
    assert names.index("warehouse.deliver") < names.index("shop.send_shipped_emails")


def test_status_as_json_has_how_each_number_was_found(manage: Manage) -> None:
    claimed()
    done = manage("status", "warehouse.fetch", "--json", "--in-doubt", "5m")
    (found,) = json.loads(done.out)
    assert found["name"] == "warehouse.fetch"
    assert found["in_doubt"] == {"value": 1, "how": "exact"}
    assert found["oldest"] == {"value": None, "how": "not recorded", "why": "set pending_since=…"}
    (of_all,) = [
        x for x in json.loads(manage("status", "--json").out) if x["name"] == found["name"]
    ]
    assert of_all.keys() == found.keys()


@pytest.mark.parametrize(
    ("conditions", "code", "words"),
    [
        (["in_doubt>1"], 0, ""),
        (["in_doubt>0"], 1, "warehouse.fetch: in_doubt>0, got 1"),
        (["pending > 2"], 0, ""),
        (["in_doubt>1", "due>1"], 1, "warehouse.fetch: due>1, got 2"),
        (["due<9"], 2, "expected a condition such as 'in_doubt>0'"),
        (["oldest>15m"], 2, "warehouse.fetch has, got 'oldest>15m': set pending_since=…"),
        (["doubt>0"], 2, "expected a condition such as 'in_doubt>0'"),
        (["in_doubt>few"], 2, "invalid condition value: 'in_doubt>few'"),
        (["pending>10001"], 2, "expected at most 10000 rows, up to which they are counted"),
        (["oldest>soon"], 2, "expected a duration up to ten years, such as 90"),
    ],
)
def test_a_condition_decides_on_the_exit_code(
    manage: Manage, conditions: list[str], code: int, words: str
) -> None:
    claimed()
    Errand.objects.bulk_create([Errand(), Errand()])
    arguments = [argument for each in conditions for argument in ("--fail-if", each)]
    done = manage("status", "warehouse.fetch", *arguments)
    assert done.code == code
    assert words in done.err
    assert done.out == ""


def test_what_cannot_be_found_out_is_neither_green_nor_met(faulty: None, manage: Manage) -> None:
    done = manage("status", "faulty.haunt", "--fail-if", "in_doubt>0", "--fail-if", "pending>9")
    assert done.code == 3
    reason = "CommandError: faulty.haunt: could not be found out: the database"
    assert done.err.startswith(reason)
    # A reason that is a sentence with its own end does not end in the middle of this one.
    assert ".;" not in done.err


def test_a_condition_that_is_met_is_worse_than_one_that_is_not_known(
    faulty: None, manage: Manage
) -> None:
    parcels("")
    done = manage("status", "warehouse.deliver", "faulty.haunt", "--fail-if", "pending>0")
    assert done.code == 1
    assert done.err == "CommandError: warehouse.deliver: pending>0, got 1.\n"


def test_what_takes_too_long_is_unknown_and_decides_no_condition(manage: Manage) -> None:
    # As while a migration is at work on the table.
    with another_session("LOCK TABLE tests_parcel IN ACCESS EXCLUSIVE MODE"):
        shown = manage("status", "warehouse.deliver", "--timeout", "0.2")
        found = manage("status", "warehouse.deliver", "--timeout", "0.2", "--fail-if", "pending>0")
        listed = manage("list", "--timeout", "0.2")
    assert re.search(r"pending +could not be found out: not within 0.2 s\n", shown.out)
    assert (found.code, listed.code) == (3, 3)
    assert "warehouse.deliver: could not be found out: not within 0.2 s" in found.err
    assert re.search(r"^ *\? .* warehouse\.deliver", listed.out, re.MULTILINE)


def test_the_age_of_the_oldest_row_is_a_condition(manage: Manage, install: Install) -> None:
    install(
        "aging",
        """
        @batch_processor(
            pending=lambda: Parcel.objects.filter(sent=False),
            done={"sent": True},
            pending_since="sent_at",
        )
        def send(parcel):
            \"\"\"Send a parcel.\"\"\"
        """,
    )
    assert manage("status", "aging.send", "--fail-if", "oldest>15m").code == 0
    Parcel.objects.create(sent_at=timezone.now() - timedelta(minutes=20))
    done = manage("status", "aging.send", "--fail-if", "oldest>15m")
    assert done.code == 1
    assert "aging.send: oldest>15m, got 20" in done.err
    assert manage("status", "aging.send", "--fail-if", "oldest>0.5h").code == 0
    listed = next(line for line in manage("list").out.splitlines() if "aging.send" in line)
    assert listed.split() == [
        *("1", "20", "min", "-", "waiting", "aging.send", "Send", "a", "parcel.")
    ]


# --- show


def test_show_says_why_a_row_is_not_handled(manage: Manage) -> None:
    row = claimed()
    done = manage("show", "warehouse.fetch", str(row.pk))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"warehouse.fetch, row {row.pk}: it is in doubt")
    assert "  pending         no" in lines
    assert "  in doubt        yes" in lines
    assert any(line.startswith("  claimed_at      20") for line in lines)
    assert "  locked          no" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["warehouse.fetch", "0"], 1, "row 0: there is no row with this key."),
        (["warehouse.fetch", "x"], 2, "expected a primary key of the rows of warehouse.fetch, got"),
    ],
)
def test_show_of_a_row_that_is_not_there(
    manage: Manage, arguments: list[str], code: int, words: str
) -> None:
    done = manage("show", *arguments)
    assert done.code == code
    assert words in done.err


# --- requeue, mark-done, discard


def test_nothing_is_written_unless_the_command_says_so(manage: Manage) -> None:
    row, young = claimed(), claimed(minutes=1)
    done = manage("mark-done", "warehouse.fetch", "--pk", str(row.pk))
    assert done.code == 2
    assert "one of the arguments --dry-run --yes is required" in done.err
    dry = manage("mark-done", "warehouse.fetch", "--in-doubt", "5m", "--dry-run")
    assert (dry.code, dry.out) == (
        0,
        f"warehouse.fetch: 1 row ({row.pk}) would be marked as done\n",
    )
    none = manage("mark-done", "warehouse.fetch", "--in-doubt", "1h", "--yes")
    assert (none.code, none.out) == (0, "warehouse.fetch: 0 rows marked as done\n")
    row.refresh_from_db()
    assert (row.done, row.claimed) == (False, True)
    assert manage("requeue", "warehouse.fetch", "--in-doubt", "5m", "--yes").code == 0
    row.refresh_from_db()
    young.refresh_from_db()
    assert (row.claimed, young.claimed) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["requeue", "warehouse.fetch"], "one of the arguments --pk --from --in-doubt --given-up"),
        (["requeue", "warehouse.deliver", "--pk", "1"], "expected reset=… for requeue()"),
        (["discard", "warehouse.fetch", "--pk", "1"], "expected discard(rows, values={…})"),
        (
            ["mark-done", "warehouse.fetch", "--pk", "1", "--reason", "x"],
            "unrecognized arguments: --reason",
        ),
    ],
)
def test_what_cannot_be_done_is_a_wrong_command_line(
    manage: Manage, arguments: list[str], words: str
) -> None:
    Errand.objects.create(pk=1)
    Parcel.objects.create(pk=1)
    for how in ("--yes", "--dry-run"):
        done = manage(*arguments, how)
        assert done.code == 2
        assert words in done.err


def test_what_was_given_up_is_discarded_put_back_or_marked_as_done(
    manage: Manage, install: Install
) -> None:
    install("errands", OF_ERRORS)
    by_hand = given_up()
    done = manage("mark-done", "errands.run", "--given-up", "--yes")
    assert done.out == f"errands.run: 1 row ({by_hand.pk}) marked as done\n"
    dead, waits = given_up(), Errand.objects.create()
    done = manage("requeue", "errands.run", "--given-up", "--yes", "--json")
    document = {"name": "errands.run", "rows": 1, "changed": 1, "dry_run": False, "left": []}
    assert json.loads(done.out) == document
    dead.refresh_from_db()
    assert (dead.dead, dead.attempts, dead.last_error) == (False, 0, "")
    done = manage("discard", "errands.run", "--pk", str(waits.pk), "--reason", "left", "--yes")
    assert done.out == f"errands.run: 1 row ({waits.pk}) discarded\n"
    waits.refresh_from_db()
    assert (waits.dead, waits.last_error) == (True, "Discard: left")
    again = manage("discard", "errands.run", "--pk", str(waits.pk), "--yes")
    assert (again.code, again.out.splitlines()) == (
        1,
        [
            f"errands.run: 1 row ({waits.pk}) left: neither pending nor claimed",
            "errands.run: 0 rows discarded",
        ],
    )
    assert again.err == "CommandError: 1 row left.\n"


def test_the_conditions_of_the_ledger_need_it(manage: Manage) -> None:
    done = manage("status", "warehouse.deliver", "--fail-if", "paused>1d")
    assert done.code == 2
    assert "add 'dcl_processor.ledger' to INSTALLED_APPS" in done.err


# --- rows


def test_rows_lists_all_rows_in_a_state_with_since_attempts_and_error(manage: Manage) -> None:
    doubtful, young = claimed(), claimed(minutes=0)
    done = manage("rows", "warehouse.fetch", "--in-doubt")
    assert (done.code, done.err) == (0, "")
    head, line = done.out.splitlines()
    assert head.split() == ["key", "since", "attempts", "error"]
    assert line.split() == [str(doubtful.pk), "10", "min", "-"]
    dead = given_up()
    done = manage("rows", "warehouse.try_twice", "--given-up")
    assert done.out.splitlines()[1].split() == [str(dead.pk), "-", "2", "OSError:", "no", "route"]
    assert str(young.pk) not in manage("rows", "warehouse.fetch", "--due").out


def test_rows_are_read_in_pages_and_all_of_them_are_printed(manage: Manage) -> None:
    """As CSV with a head, and as a JSON object in each line."""
    Parcel.objects.bulk_create(Parcel() for _ in range(1_201))
    pks = [str(pk) for pk in Parcel.objects.order_by("pk").values_list("pk", flat=True)]
    head, *lines = manage("rows", "warehouse.deliver", "--due", "--csv").out.splitlines()
    assert head == "key,since,attempts,error"
    assert [line.partition(",")[0] for line in lines] == pks
    found = manage("rows", "warehouse.deliver", "--due", "--json").out.splitlines()
    assert [json.loads(line)["key"] for line in found] == pks


def test_an_error_in_a_row_forges_no_line_no_formula_and_shows_no_secret(manage: Manage) -> None:
    errors = "=cmd|'/C calc'!A0", "no\n7,\x1b[2J", "password=hunter2"
    for error in errors:
        Errand.objects.create(result="x", attempts=2, last_error=error, dead=True)
    for way in ("--csv", "--json"):
        out = manage("rows", "warehouse.try_twice", "--given-up", way).out
        assert len(out.splitlines()) == 3 + (way == "--csv")
        assert "hunter2" not in out
        assert "\x1b" not in out
    assert ",'=cmd|" in manage("rows", "warehouse.try_twice", "--given-up", "--csv").out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["warehouse.fetch"], 2, "one of the arguments --in-doubt --given-up --due --later"),
        (["warehouse.fetch", "--due", "--csv", "--json"], 2, "not allowed with argument"),
        (["warehouse.fetch", "--in-doubt", "soon"], 2, "expected a duration up to ten years"),
    ],
)
def test_rows_refuses_what_it_cannot_list(
    manage: Manage, arguments: list[str], code: int, words: str
) -> None:
    done = manage("rows", *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
