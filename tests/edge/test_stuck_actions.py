"""``processors requeue``, ``mark-done``, ``discard``: which rows they leave, and what they say."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from dcl_processor.operator import actions
from dcl_processor.options.worker import this_user
from tests.contract.support.temporary import execute
from tests.edge.manage import Install, Manage
from tests.edge.stuck import DEAD, another_session, claimed
from tests.models import Errand, Message, Seat

pytestmark = pytest.mark.django_db(transaction=True)

FETCH = "warehouse.fetch"


# --- rows that a worker has, or had


@pytest.mark.parametrize(
    ("older", "number"), [("0", 2), ("30s", 2), ("1m", 2), ("15m", 1), ("1h", 0)]
)
def test_an_action_takes_as_many_rows_in_doubt_as_status_counts(
    manage: Manage, older: str, number: int
) -> None:
    """No claim that a worker may be at work on is in doubt, however young they may be."""
    for minutes in (0, 0.75, 10, 20):
        claimed(minutes=minutes)
    counted = json.loads(manage("status", FETCH, "--in-doubt", older, "--json").out)[0]
    done = manage("requeue", FETCH, "--in-doubt", older, "--dry-run", "--json")
    acted = json.loads(done.out)
    assert (counted["in_doubt"]["value"], acted["rows"], acted["left"]) == (number, number, [])
    assert counted["in_progress"]["value"] == 4 - number
    assert done.code == 0


def test_a_row_that_is_done_is_put_back_by_force_alone(manage: Manage) -> None:
    row = Errand.objects.create(done=True, claimed=True)
    waits = Errand.objects.create()
    done = manage("requeue", FETCH, "--pk", str(row.pk), str(waits.pk), "--pk", "0", "--yes")
    assert (done.code, done.out.splitlines()) == (
        1,
        [
            f"{FETCH}: 1 row (0) left: no such row",
            (
                f"{FETCH}: 1 row ({row.pk}) left: done, or not waiting yet; force puts it back, "
                "and repeats its effect"
            ),
            f"{FETCH}: 1 row ({waits.pk}) put back into pending",
        ],
    )
    assert done.err == "CommandError: 2 rows left.\n"
    row.refresh_from_db()
    assert row.claimed
    assert manage("requeue", FETCH, "--pk", str(row.pk), "--force", "--yes").code == 0
    row.refresh_from_db()
    assert not row.claimed


def test_the_last_row_of_a_claim_has_the_time_of_those_before_it(
    manage: Manage, install: Install
) -> None:
    """It is claimed when the first one begins."""
    install("several", SEVERAL)
    row, old = claimed(minutes=4), claimed(minutes=6)
    done = manage("requeue", "several.run", "--pk", str(row.pk), str(old.pk), "--yes")
    assert (done.code, done.out.splitlines()) == (
        1,
        [
            (
                f"several.run: 1 row ({row.pk}) left: claimed less than 300 s ago: a worker may "
                "be at work; use force"
            ),
            f"several.run: 1 row ({old.pk}) put back into pending",
        ],
    )
    claimed(minutes=6)
    assert manage("status", "several.run", "--fail-if", "in_doubt>1").code == 0
    assert manage("status", "several.run", "--fail-if", "in_doubt>0").code == 1


def test_a_choice_that_takes_too_long_is_ended(manage: Manage) -> None:
    row = claimed()
    with another_session("LOCK TABLE tests_errand IN ACCESS EXCLUSIVE MODE"):
        done = manage("mark-done", FETCH, "--in-doubt", "5m", "--timeout", "3", "--yes")
    assert done.code == 3
    assert "statement timeout" in done.err
    row.refresh_from_db()
    assert not row.done


# --- values


MESSAGES = """
from tests.models import Message

@batch_processor(pending=lambda: Message.objects.filter(data={}), done={"data": {"a": 1}})
def send(message): ...
"""


SEVERAL = """
from dcl_processor import Delivery
from tests.models import Errand

@batch_processor(
    pending=lambda: Errand.objects.filter(done=False, claimed=False),
    done={"done": True},
    claim={"claimed": True},
    claimed_at="claimed_at",
    reset={"claimed": False},
    delivery=Delivery.AT_MOST_ONCE,
    batch_size=5,
)
def run(errand): ...
"""


def test_one_row_is_chosen_without_a_read_of_the_table(manage: Manage, install: Install) -> None:
    """Which of 50 million rows are pending, or were given up, is a question of minutes."""
    install("dead", DEAD)
    Errand.objects.bulk_create([Errand(place=number, done=True) for number in range(20_000)])
    row = Errand.objects.create(dead=True)
    execute("VACUUM ANALYZE tests_errand")
    with CaptureQueriesContext(connection) as sent:
        done = manage("requeue", "dead.run", "--pk", str(row.pk), "--dry-run")
        shown = manage("show", "dead.run", str(row.pk))
    assert (done.code, shown.code) == (0, 0)
    asked = [q["sql"] for q in sent.captured_queries if 'FROM "tests_errand"' in q["sql"]]
    assert len(asked) > 2
    with connection.cursor() as cursor:
        for sql in asked:
            cursor.execute(f"EXPLAIN {sql}")
            plan = "\n".join(line for (line,) in cursor.fetchall())
            assert "Seq Scan" not in plan, (sql, plan)


# --- what is printed

SEATS = """
from tests.models import Seat

@batch_processor(
    pending=lambda: Seat.objects.filter(sent=False), done={"sent": True}, reset={"sent": False}
)
def usher(seat): ...
"""


def test_a_composite_key_is_written_as_it_is_read(manage: Manage, install: Install) -> None:
    install("seats", SEATS)
    Seat.objects.create(row=3, number=4, sent=True)
    dry = manage("requeue", "seats.usher", "--pk", "[3, 4]", "--force", "--dry-run")
    assert dry.out == "seats.usher: 1 row ([3, 4]) would be put back into pending\n"
    left = manage("requeue", "seats.usher", "--pk", "[3,5]", "--dry-run", "--json")
    assert json.loads(left.out)["left"] == [{"pk": "[3, 5]", "why": "no such row"}]
    shown = manage("show", "seats.usher", "[3, 4]")
    assert shown.out.startswith("seats.usher, row [3, 4]: ")
    assert json.loads(manage("show", "seats.usher", "[3, 4]", "--json").out)["pk"] == "[3, 4]"


# --- what could not be found out


def test_an_error_of_pending_is_not_one_of_the_key(manage: Manage, install: Install) -> None:
    install(
        "tenants",
        """
        def pending():
            raise ValueError("no tenant")

        @batch_processor(pending=pending, done={"sent": True}, reset={"sent": False})
        def send(parcel): ...
        """,
    )
    for arguments in (["show", "tenants.send", "1"], ["requeue", "tenants.send", "--pk", "1"]):
        done = manage(*arguments, *["--dry-run"] * (arguments[0] == "requeue"))
        assert done.code == 3
        assert "ValueError" in done.err
        assert "primary key" not in done.err
        assert "Traceback" not in done.err


# --- what remains of an action


def operations(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.name == "dcl_processor.operations"]


def test_an_action_is_in_the_log_with_who_did_what_to_which_rows(
    manage: Manage, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [claimed() for _ in range(12)]
    with caplog.at_level(logging.INFO, "dcl_processor.operations"):
        assert manage("requeue", FETCH, "--in-doubt", "1m", "--dry-run").code == 0
        assert operations(caplog) == []
        assert manage("requeue", FETCH, "--in-doubt", "1m", "--yes").code == 0
    (record,) = operations(caplog)
    keys = ", ".join(str(row.pk) for row in rows[:10])
    assert record.levelname == "INFO"
    assert record.getMessage() == f"{FETCH}: requeue by {this_user()}: 12 rows ({keys}, …)"
    fields = vars(record)
    assert (fields["processor"], fields["row_count"]) == (FETCH, 12)


@pytest.mark.parametrize("way", [(), ("--json",)], ids=" ".join)
def test_an_action_that_an_error_ends_says_what_it_has_written(
    manage: Manage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: tuple[str, ...],
) -> None:
    """The error comes between two chunks; the log has it too."""
    monkeypatch.setattr(actions, "WINDOW", 2)
    updates = list[str]()

    def end(execute: Callable[..., object], sql: str, *arguments: object) -> object:
        updates.extend([sql] if "UPDATE " in sql and " SET " in sql else [])
        if len(updates) == 2:
            raise OperationalError("gone\npassword=hunter2")
        return execute(sql, *arguments)

    rows = [claimed() for _ in range(3)]
    with connection.execute_wrapper(end), caplog.at_level(logging.INFO, "dcl_processor.operations"):
        done = manage("mark-done", FETCH, "--in-doubt", "5m", "--yes", *way)
    assert (done.code, done.err) == (3, "CommandError: OperationalError: gone password=***.\n")
    keys = ", ".join(str(row.pk) for row in rows[:2])
    if way:
        assert json.loads(done.out)["changed"] == 2
    else:
        assert done.out == f"{FETCH}: 2 rows ({keys}) marked as done\n"
    (record,) = operations(caplog)
    assert record.getMessage().endswith(f": 2 rows ({keys})")
    assert Errand.objects.filter(done=True).count() == 2


# --- mark-done --from: what was looked up elsewhere


@pytest.fixture
def looked_up(tmp_path: Path) -> Callable[..., str]:
    def write(*lines: str) -> str:
        path = tmp_path / "looked up.csv"
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write


def test_many_rows_are_settled_from_a_file_each_with_its_own_values(
    manage: Manage, looked_up: Callable[..., str]
) -> None:
    one, two, young = claimed(), claimed(), claimed(minutes=0)
    path = looked_up("key,result", f"{one.pk},ch_1", f'{two.pk},"ch_2, twice"', f"{young.pk},ch_3")
    arguments = ("mark-done", FETCH, "--from", path)
    dry = manage(*arguments, "--dry-run")
    assert f"{FETCH}: 2 rows ({one.pk}, {two.pk}) would be marked as done\n" in dry.out
    assert not Errand.objects.filter(done=True).exists()
    done = manage(*arguments, "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (
        1,
        f"{FETCH}: 2 rows ({one.pk}, {two.pk}) marked as done",
    )
    assert "claimed less than 60 s ago" in done.out
    found = Errand.objects.filter(done=True).order_by("pk").values_list("pk", "result")
    assert list(found) == [(one.pk, "ch_1"), (two.pk, "ch_2, twice")]


def test_values_are_as_their_columns_hold_them_and_masked_in_the_trace(
    manage: Manage,
    install: Install,
    looked_up: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    install("office", MESSAGES)
    row = Message.objects.create()
    arguments = ("discard", "office.send", "--yes", "--from")
    assert manage(*arguments, looked_up("key,data", f"{row.pk},{{a}}")).code == 2
    path = looked_up("key,data", f'{row.pk},"[""token=hunter2""]"')
    with caplog.at_level(logging.INFO, "dcl_processor.operations"):
        done = manage(*arguments, path)
    assert done.code == 0, done.err
    row.refresh_from_db()
    assert row.data == ["token=hunter2"]
    (record,) = operations(caplog)
    assert "hunter2" not in record.getMessage()


def test_the_rows_of_a_list_are_put_back_from_the_file_that_rows_has_printed(
    manage: Manage, looked_up: Callable[..., str]
) -> None:
    row = claimed()
    path = looked_up(*manage("rows", FETCH, "--in-doubt", "--csv").out.splitlines())
    done = manage("requeue", FETCH, "--from", path, "--yes")
    assert done.out == f"{FETCH}: 1 row ({row.pk}) put back into pending\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["result", "x"], "expected a column 'key'"),
        (["key,result", "7"], "in each line as many columns as in the head, got {'key': '7', "),
        (["key", "7", "7"], "a file that has each row once"),
        (["key", "x"], "expected a primary key of the rows of warehouse.fetch, got 'x'"),
        (["key,reslt", "7,x"], "got 'reslt=x': "),
        (["key,claimed_at", "7,soon"], "got 'claimed_at=soon': "),
    ],
)
def test_a_file_that_is_not_understood_changes_nothing(
    manage: Manage, looked_up: Callable[..., str], lines: list[str], words: str
) -> None:
    row = claimed()
    done = manage("mark-done", FETCH, "--from", looked_up(*lines), "--yes")
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    missing = manage("mark-done", FETCH, "--from", "/there/is/none.csv", "--yes")
    assert (missing.code, "No such file" in missing.err) == (2, True)
    row.refresh_from_db()
    assert row.claimed_at is not None
