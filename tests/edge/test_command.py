"""``manage.py processors``: what it says, to whom, and with which exit code."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django import DjangoAssertNumQueries

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import InvalidOption
from dcl_processor.pending import steady
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.errands import elsewhere
from tests.edge.manage import Install, Manage, command, processors, shown_on_a_terminal, started
from tests.edge.watchers import parcels, unsent
from tests.gates import at_gate
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE
from tests.warehouse import processors as warehouse

pytestmark = pytest.mark.django_db(transaction=True)


# --- silence, reports, failures


def test_without_a_terminal_and_with_nothing_to_do_it_is_silent() -> None:
    """Cron mails any output."""
    done = processors("run", "--all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_terminal_an_empty_run_costs_one_select(
    installed: None, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    out, err = StringIO(), StringIO()
    with django_assert_num_queries(1) as queries:
        call_command("processors", "run", "warehouse.deliver", stdout=out, stderr=err)
    assert queries.captured_queries[0]["sql"].startswith("SELECT")
    assert (out.getvalue(), err.getvalue()) == ("", "")


def test_rows_that_fail_go_to_stderr_in_one_line_each() -> None:
    """No traceback, neither from the command nor from a log that is not configured."""
    _, broken, _ = parcels("", "broken", "")
    done = processors("run", "warehouse.deliver")
    assert done.returncode == 1
    assert done.stdout.startswith("warehouse.deliver: 2 processed, 1 failed in ")
    assert done.stderr.splitlines() == [
        f"warehouse.deliver: row {broken} failed: ValueError: no address",
        "CommandError: 1 row failed.",
    ]
    assert list(Parcel.objects.filter(sent=False).values_list("pk", flat=True)) == [broken]


# --- several processors


def test_one_that_cannot_run_does_not_stop_the_others(
    faulty: None, manage: Manage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAILBOX", str(tmp_path / "mailbox"))
    parcels("")
    cannot = ("faulty.haunt", "faulty.run_in_circles", "faulty.slice_off", "faulty.post")
    done = manage("run", *cannot, "warehouse.deliver")
    assert done.code == 1
    assert done.out.startswith("warehouse.deliver: 1 processed")
    slice_off, haunt, circles, post, summary = done.err.splitlines()
    assert post.startswith("faulty.post: expected the resource to open, got ConnectionRefused")
    assert haunt.startswith("faulty.haunt: the database reported: ")
    assert "faulty_ghost" in haunt
    assert circles.startswith("faulty.run_in_circles: expected done={'tries': 1} to take a row out")
    assert slice_off.startswith("faulty.slice_off: expected pending to be a queryset")
    assert summary == (
        "CommandError: faulty.slice_off and faulty.haunt and faulty.run_in_circles and faulty.post "
        "did not run to the end."
    )


def test_when_time_is_up_no_row_of_another_processor_starts(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog of the first one takes all the time."""
    clock = Clock()
    monkeypatch.setattr(steady, "monotonic", clock.monotonic)
    monkeypatch.setattr(warehouse, "audit", lambda _: setattr(clock, "passed", clock.passed + HOUR))
    parcels("", "")
    names = ("warehouse.deliver", "warehouse.weigh", "warehouse.fetch")
    done = manage("run", *names, "--timeout", "50")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("warehouse.deliver: 1 processed")
    assert len(done.out.splitlines()) == 1
    assert (len(unsent()), Parcel.objects.filter(weight=None).count()) == (1, 2)


def test_all_are_run_in_another_order_each_time(manage: Manage) -> None:
    """In the same order a backlog of one would keep those behind it from ever being run."""

    def order() -> list[str]:
        done = manage("run", "--all", "--json")
        return [json.loads(line)["name"] for line in done.out.splitlines()]

    first, second = order(), order()
    assert sorted(first) == sorted(second)
    assert len(first) >= 9
    assert first != second  # once in 362,880 runs it is the same order


# --- options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "warehouse.delivr"], "expected the name of a processor, one of "),
        (["run"], "one of the arguments NAME --all is required"),
        (["run", "warehouse.deliver", "--all"], "--all: not allowed with argument"),
        (["run", "--all", "--limit", "many"], "invalid int value: 'many'"),
        (["run", "--all", "--limitt=5"], "unrecognized arguments: --limitt"),
        (["run", "--all", "--timeout", "nan"], "expected a duration up to ten years"),
        (["run", "--all", "--workers", "0"], "expected --workers to be from 1 to 256, got 0"),
        (["run", "--all", "--using", "nowhere"], "nowhere"),
        (["run", "--all", "--dry-run", "--watch"], "--watch: not allowed with argument --dry-run"),
        (["run", "--all", "--listen"], "expected --watch beside --listen, got --listen alone"),
        (["run", "--all", "--watch", "0"], "expected --watch to be 0.1 or more, got 0"),
        (["requeu", "x", "--pk", "7"], "argument ACTION: invalid choice: 'requeu' (choose from "),
        (["show"], "the following arguments are required: NAME, PK"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_a_usage_error_ends_with_exit_code_2(
    manage: Manage, arguments: list[str], words: str
) -> None:
    parcels("")
    done = manage(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err
    assert len(unsent()) == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_concurrency_reaches_each_copy(gate: Path, workers: str) -> None:
    """Four in one process meet, and stay until four have met in each."""
    Errand.objects.bulk_create(Errand() for _ in range(16))
    arguments = ("run", "warehouse.gather", "--concurrency", "4", "--workers", workers)
    with started(*arguments, GATE=str(gate)) as process:
        at_gate(gate, "met", handlers=int(workers))
        (gate / "open").touch()
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")


def test_limit_and_timeout_reach_the_run(manage: Manage) -> None:
    parcels("", "", "")
    limited = manage("run", "warehouse.deliver", "--limit", "2")
    assert limited.out.startswith("warehouse.deliver: 2 processed")
    assert limited.out.endswith("; stopped by limit\n")
    assert len(unsent()) == 1
    assert manage("run", "warehouse.deliver", "--timeout", "0") == (0, "", "")
    assert len(unsent()) == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_using_chooses_the_database(
    manage: Manage, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    parcels("")
    with django_assert_num_queries(0, using="default"):
        done = manage("run", "warehouse.deliver", "--using", "other")
    assert done.code == 0
    assert len(unsent()) == 0


def test_json_is_one_document_per_run_and_nothing_else(manage: Manage) -> None:
    _, broken = parcels("", "broken")
    done = manage("run", "warehouse.deliver", "warehouse.weigh", "--json")
    assert done.code == 1
    deliver, weigh = (json.loads(line) for line in done.out.splitlines())
    assert (deliver["name"], deliver["processed"], deliver["failed"]) == ("warehouse.deliver", 1, 1)
    assert deliver["failures"][0]["pk"] == broken
    assert deliver["failures"][0]["error"] == "ValueError('no\\naddress')"
    assert (weigh["name"], weigh["processed"], weigh["ok"]) == ("warehouse.weigh", 2, True)


# --- list


def test_list_shows_every_processor_with_its_pending_rows(manage: Manage) -> None:
    parcels("", "", "")
    Parcel.objects.create(weight=1, sent=True)
    done = manage("list")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "pending  oldest  left  state    processor"
    about = {line.partition("warehouse.")[2]: line.split()[:4] for line in lines}
    assert about["deliver         Bring a parcel to its door."] == ["3", "-", "-", "waiting"]
    assert about["weigh           Weigh the parcels that have no weight."][0] == "3"
    assert any(line.startswith("      0       -     -  idle     warehouse.fetch") for line in lines)


# --- on a terminal


def test_on_a_terminal_an_empty_run_says_so() -> None:
    code, shown = shown_on_a_terminal(command("run", "warehouse.deliver"))
    assert code == 0
    assert "warehouse.deliver: nothing pending" in shown


def test_on_a_terminal_a_line_counts_the_rows_until_the_report_takes_its_place() -> None:
    parcels("broken", "", "")
    code, shown = shown_on_a_terminal(command("run", "warehouse.deliver"))
    assert code == 1
    line, clear = "warehouse.deliver: 1 failed", "\r\x1b[K"
    assert shown.startswith(f"{clear}{line}")
    *_, rest = shown.split(clear)
    assert "warehouse.deliver: 2 processed, 1 failed" in rest
    assert rest.count("\n") >= 2


# --- signals


def test_in_a_thread_it_runs_without_handlers(installed: None) -> None:
    """Python lets only the main thread have any."""
    parcels("")
    out = StringIO()

    elsewhere(lambda: call_command("processors", "run", "warehouse.deliver", stdout=out))
    assert out.getvalue().startswith("warehouse.deliver: 1 processed")


@pytest.mark.django_db(transaction=True)
def test_a_program_that_calls_the_command_gets_the_sentence(installed: None) -> None:
    with pytest.raises(CommandError, match="unrecognized arguments: --limitt"):
        call_command("processors", "run", "warehouse.deliver", "--limitt", "5")
    call_command("processors", "run", "warehouse.deliver", limit=1)


# --- what a first processor gets wrong is refused, or named, before it does harm


TWO = """
    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"id": 3})
    def twice(parcel):
        raise AssertionError("never called")

    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
    def send(parcel): ...
"""


@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--watch", "0.1", "--timeout", "1")])
def test_a_processor_that_its_checks_refuse_is_not_run_and_the_others_are(
    install: Install, manage: Manage, arguments: tuple[str, ...]
) -> None:
    Parcel.objects.create()
    install("post", TWO)
    _, out, err = manage("run", "post.twice", "post.send", *arguments)
    assert err.startswith("post.twice: expected done to name columns that a flip may write, got")
    assert "which is the primary key. (dcl_processor.E002)\n" in err
    assert "post.twice did not run to the end" in err
    assert ("post.send: dry run: would try 1" if "--dry-run" in arguments else "1 processed") in out


def test_a_class_whose_init_forgets_super_is_refused_by_name(
    install: Install, manage: Manage
) -> None:
    install(
        "post",
        """
    class Weigh(BatchProcessor):
        def __init__(self):
            self.scales = 1

        def pending(self):
            return Parcel.objects.filter(sent=False)

        def process(self, parcel): ...

    weigh = Weigh()
""",
    )
    words = "expected Weigh.__init__() to call super().__init__()"
    assert words in manage("list").err
    assert words in manage("run", "--all").err

    class Bare(BatchProcessor[Parcel]):
        def __init__(self) -> None:
            pass

    with pytest.raises(InvalidOption, match=r"expected Bare.__init__\(\) to call super\(\)"):
        Bare().run()
