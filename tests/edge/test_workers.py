"""Several workers on one machine: processes that share the rows, whatever becomes of one."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.core.management import call_command
from django.db import transaction
from django.db.models import Q
from hypothesis import given
from hypothesis import strategies as st

from dcl_processor import Report
from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.processes import pool
from dcl_processor.processes.graceful_stop import Stop, polite_stop
from dcl_processor.processes.news import Died, portable
from dcl_processor.processes.pool import Outcomes
from dcl_processor.processes.supervisor import LIVED_LONG, Supervisor
from dcl_processor.report.report import Failure
from tests.edge.manage import alias, at_gate, processors, python, started
from tests.edge.watchers import parcels, unsent, wait_until_sent, watching
from tests.models import Parcel
from tests.waiting import PATIENCE, until
from tests.warehouse.processors import deliver, deliver_alone

pytestmark = pytest.mark.django_db(transaction=True)


def handled(audit: Path) -> list[tuple[int, int]]:
    lines = (line.split() for line in audit.read_text().splitlines())
    return [(int(pk), int(pid)) for pk, pid in lines]


#: It changes its folder, makes the settings itself, and has no guard.
PREPARING = """
import os, sys
from django.conf import settings
from django.core.management import execute_from_command_line

os.chdir(os.path.dirname(os.path.abspath(__file__)))
os.environ["AUDIT"] = "audit"
from tests.warehouse import settings as warehouse

os.environ.pop("DJANGO_SETTINGS_MODULE", None)
settings.configure(**{name: value for name, value in vars(warehouse).items() if name.isupper()})
execute_from_command_line()
"""


def test_a_worker_runs_all_of_the_program_that_runs_the_command(tmp_path: Path) -> None:
    """Django's settings, drivers and variables may be prepared there, and nowhere else."""
    rows = Parcel.objects.bulk_create(Parcel() for _ in range(3))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "program.py").write_text(PREPARING)
    run = "processors", "run", "warehouse.deliver", "--workers", "3"
    ended = python("site/program.py", *run, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    calls = handled(tmp_path / "site" / "audit")
    assert sorted(pk for pk, _ in calls) == [row.pk for row in rows]


def free() -> int:
    """Return how many rows no session has locked."""
    with transaction.atomic():
        return len(Parcel.objects.select_for_update(skip_locked=True))


# --- sharing


def test_copies_handle_each_row_once(installed: None, audit: Path) -> None:
    """Started from this process, on this suite's own test database.

    The row that fails may be tried by each worker; its error comes across.
    """
    rows = Parcel.objects.bulk_create(Parcel(note="broken" if n == 3 else "") for n in range(200))
    told: list[str] = []
    reports = complete(pool.run(deliver, workers=2, stop=Stop(), on_row=told.append))
    good = {row.pk for row in rows if not row.note}
    assert Counter(pk for pk, _ in handled(audit)) == Counter(good)
    assert len(unsent()) == 1
    assert (len(reports), sum(each.processed for each in reports)) == (2, 199)
    assert {each.stopped for each in reports} == {"drained"}
    failures = [failure for each in reports for failure in each.failures]
    assert {failure.pk for failure in failures} == {rows[3].pk}
    assert repr(failures[0].error) == "ValueError('no\\naddress')"
    assert "tests/warehouse/processors.py" in failures[0].traceback
    shares = Counter(pid for _, pid in handled(audit))
    assert sorted(shares.values()) == sorted(
        worker.processed for worker in reports if worker.processed
    )
    assert os.getpid() not in shares
    # The parent received each when it was finished.
    assert Counter(told) == {"processed": 199, "failed": sum(worker.failed for worker in reports)}


def complete(outcomes: Sequence[Report | Trouble]) -> list[Report]:
    reports = [each for each in outcomes if isinstance(each, Report)]
    assert len(reports) == len(outcomes)
    return reports


def test_no_more_copies_start_than_there_are_rows_of_the_filter(installed: None) -> None:
    rows = Parcel.objects.bulk_create(Parcel() for _ in range(5))
    (report,) = complete(pool.run(deliver, workers=4, stop=Stop(), filter=Q(pk=rows[1].pk)))
    assert report.processed == 1
    assert Parcel.objects.filter(sent=False).count() == 4


def test_a_run_whose_time_is_over_before_its_workers_start_has_ended_by_it(installed: None) -> None:
    Parcel.objects.bulk_create(Parcel() for _ in range(2))
    (report,) = complete(pool.run(deliver, workers=2, stop=Stop(), timeout=0.0))
    assert (report.processed, report.stopped) == (0, "timeout")


def test_no_more_copies_start_than_max_workers(installed: None, audit: Path) -> None:
    Parcel.objects.bulk_create(Parcel(note="alone") for _ in range(20))
    (report,) = complete(pool.run(deliver_alone, workers=4, stop=Stop()))
    assert (report.processed, report.stopped) == (20, "drained")


def test_a_worker_that_is_killed_frees_its_slot_at_once(gate: Path, audit: Path) -> None:
    """Another command leaves meanwhile, and one that starts afterwards gets the slot."""
    notes = ["alone, gate", "alone, gate", "alone", "alone"]
    Parcel.objects.bulk_create(Parcel(note=note) for note in notes)
    alone = ("run", "warehouse.deliver_alone")
    with started(*alone, GATE=str(gate)) as killed:
        at_gate(gate)
        over = processors(*alone, "--json")
        assert (over.returncode, json.loads(over.stdout)["stopped"]) == (0, "busy")
        assert handled(audit) == []
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: free() == 4, "the row of the process that was killed")
        (gate / "open").touch()
        report = json.loads(processors(*alone, "--json", GATE=str(gate)).stdout)
    assert (report["processed"], report["stopped"]) == (4, "drained")
    assert killed.pid not in {pid for _, pid in handled(audit)}
    assert len(unsent()) == 0


def test_every_copy_gets_a_row_and_a_share_of_the_limit(gate: Path, audit: Path) -> None:
    """Each waits with the row that it has, so that the others have to take other ones."""
    Parcel.objects.bulk_create(Parcel(note="gate") for _ in range(9))
    arguments = ("run", "warehouse.deliver", "--workers", "3", "--limit", "3")
    with started(*arguments, GATE=str(gate)) as process:
        workers = at_gate(gate, handlers=3)
        (gate / "open").touch()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    # A worker skips the rows that it found locked by the others.
    own = r"warehouse\.deliver: 1 processed(, \d skipped)? in [\d.]+ s; stopped by limit "
    assert re.fullmatch("".join(rf"{own}\(worker {number}\)\n" for number in (1, 2, 3)), out)
    assert sorted(pid for _, pid in handled(audit)) == workers
    assert len(unsent()) == 6


def test_no_more_copies_start_than_there_are_rows(installed: None, audit: Path) -> None:
    """A single one is this process."""
    Parcel.objects.create()
    out = StringIO()
    call_command("processors", "run", "warehouse.deliver", "--json", workers=4, stdout=out)
    report = json.loads(out.getvalue())
    assert (report["processed"], "worker" in report) == (1, False)
    assert [pid for _, pid in handled(audit)] == [os.getpid()]


# --- death and signals


def test_a_copy_that_is_killed_costs_the_others_nothing(gate: Path, audit: Path) -> None:
    Parcel.objects.bulk_create(Parcel(note="gate") for _ in range(2))
    with started("run", "warehouse.deliver", "--workers", "2", "--json", GATE=str(gate)) as process:
        killed, _ = at_gate(gate, handlers=2)
        os.kill(killed, signal.SIGKILL)
        # The database may hear of it later than the other one needs to come to the end.
        until(lambda: free() == 1, "the row of the process that was killed")
        (gate / "open").touch()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    # What it had at hand, as far as the other one looked for that in time.
    *deaths, lost, summary = err.splitlines()
    assert all(f"process {killed} died while it handled row" in line for line in deaths)
    sentence = "killed by SIGKILL; its committed work stays, but is not counted"
    assert re.fullmatch(f"warehouse.deliver, worker [12]: {sentence}", lost)
    number = lost.removeprefix("warehouse.deliver, worker ")[0]
    assert summary == f"CommandError: warehouse.deliver (worker {number}) did not run to the end."
    # Its row may be what has killed it, and is left to the next run.
    documents = {each["worker"]: each for each in map(json.loads, out.splitlines())}
    other = documents.pop(3 - int(number))
    assert (other["processed"], other["ok"], other["stopped"]) == (1, True, "drained")
    broken = {"name": "warehouse.deliver", "ok": False, "error": sentence, "worker": int(number)}
    assert documents == {int(number): broken}
    assert len(unsent()) == 1
    assert killed not in {pid for _, pid in handled(audit)}


@contextmanager
def room_for_files(number: int) -> Iterator[None]:
    """Let this process open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    free = (each for each in itertools.count() if each not in opened)
    most = next(itertools.islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_copy_that_cannot_be_started_costs_the_others_nothing(
    installed: None, audit: Path
) -> None:
    """Each that runs keeps one file of its parent's open, and starting one takes six."""
    Parcel.objects.bulk_create(Parcel() for _ in range(20))
    with room_for_files(9):
        workers = pool.run(deliver, workers=8, stop=Stop())
    assert len(workers) == 8
    reports = [worker for worker in workers if isinstance(worker, Report)]
    assert sum(report.processed for report in reports) == len(handled(audit)) == 20
    troubles = [worker for worker in workers if isinstance(worker, Trouble)]
    assert troubles
    assert {re.sub(r"\[.*", "", each.sentence) for each in troubles} == {
        "could not be started: OSError: "
    }


def test_copies_finish_their_rows_and_end_when_the_parent_is_killed(
    gate: Path, audit: Path
) -> None:
    Parcel.objects.bulk_create(Parcel(note="gate") for _ in range(4))
    with started("run", "warehouse.deliver", "--workers", "2", GATE=str(gate)) as process:
        workers = at_gate(gate, handlers=2)
        process.kill()
        at_gate(gate, "stopping", handlers=2)
        (gate / "open").touch()
        until(lambda: not any(is_running(pid) for pid in workers), "the workers to end")
        _, err = process.communicate(timeout=PATIENCE)
    assert err == ""
    assert len(handled(audit)) == 2
    assert len(unsent()) == 2


def is_running(pid: int) -> bool:
    # One whose parent has not waited for it is a zombie, and has ended.
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


# --- what is refused


def refused(words: str, **options: Any) -> None:
    with pytest.raises(Unsupported, match=words):
        pool.run(deliver, workers=2, stop=Stop(), **options)


def test_an_open_transaction_is_refused(installed: None) -> None:
    """The workers would not see its rows; TestCase is such a transaction too."""
    Parcel.objects.bulk_create(Parcel() for _ in range(3))
    with transaction.atomic():
        refused("no open transaction on 'default', got one: workers are other processes")
    assert len(unsent()) == 3


def test_a_database_in_memory_is_refused(installed: None) -> None:
    Parcel.objects.bulk_create(Parcel() for _ in range(3))
    with alias("memory", ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        refused("got 'memory' in this process's memory; use a file, or run one worker")


def test_settings_that_cannot_be_named_are_refused(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Parcel.objects.bulk_create(Parcel() for _ in range(3))
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    refused("expected DJANGO_SETTINGS_MODULE to name the settings")


# --- what becomes of each


def test_a_worker_whose_successor_has_ended_regularly_has_its_report_and_its_death() -> None:
    outcomes = Outcomes("p", [None], None)
    outcomes.tell(1, None, Died(Trouble("killed"), 0.0))
    outcomes.tell(1, "p", Report(name="p", processed=1))
    (outcome,) = outcomes.in_order()
    assert isinstance(outcome, Trouble)
    assert (outcome.sentence, outcome.report) == ("killed", Report(name="p", processed=1))


@given(limit=st.none() | st.integers(0, 1000), workers=st.integers(1, 50))
def test_a_limit_is_shared_out_evenly_and_in_full(limit: int | None, workers: int) -> None:
    shares = pool.shares(limit, workers)
    if limit is None:
        assert shares == [None] * workers
        return
    numbers = [share for share in shares if share is not None]
    assert sum(numbers) == limit
    assert len(numbers) == workers
    assert max(numbers) - min(numbers) <= 1


def test_an_error_that_cannot_say_what_it_is_travels_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    report = portable(Report(name="p", failed=1, failures=[Failure(1, Mute(), "")]))
    (failure,) = pickle.loads(pickle.dumps(report)).failures  # noqa: S301  # our own
    assert (str(failure.error), repr(failure.error)) == ("Mute: <Mute>", "<Mute>")


# --- the polite stop itself


def test_a_signal_ignored_by_whoever_started_us_stays_ignored(interrupts: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with polite_stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_wait_ends_when_a_signal_comes_in_the_middle_of_it() -> None:
    """Which would never end with a plain event, whose lock is held by the wait."""
    with polite_stop() as stop:
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGTERM])
        timer.start()
        assert stop.wait()
        timer.join()
    assert Stop().wait(0.01) is False
    stop.clear()
    assert not stop.is_set()


# --- copies of a watch: one that dies is started again, and costs the others nothing


DELIVER = "warehouse.deliver"
DIED = "{}, worker [12]: killed by {}; its committed work stays, but is not counted; "
AGAIN = r"it is started again( in \d+\.\d s)?"


def handlers(audit: Path) -> set[int]:
    return {int(line.split()[1]) for line in audit.read_text().splitlines()}


@pytest.mark.parametrize(("note", "how"), [("kill", "SIGKILL"), ("crash", "SIGSEGV")])
def test_a_copy_that_dies_is_named_and_another_takes_its_place(
    audit: Path, note: str, how: str
) -> None:
    """The row that kills each worker that takes it does so again, later each time."""
    (deadly,) = parcels(note)
    with watching(DELIVER, "--watch", "0.2", "--workers", "2") as watcher:
        deaths = [watcher.says(f"{DELIVER}, worker ", err=True) for _ in range(3)]
        Parcel.objects.filter(pk=deadly).update(note="")
        wait_until_sent()
        parcels(*[""] * 4)
        wait_until_sent()
        code, _, _ = watcher.end()
    assert code == 0
    died = DIED.format(DELIVER, how) + AGAIN
    assert all(re.fullmatch(died, line) for line in deaths), deaths
    assert handlers(audit)


def test_it_ends_though_a_copy_waits_to_be_started_again() -> None:
    parcels("kill")
    with watching(DELIVER, "--watch", "0.1", "--workers", "2") as watcher:
        for _ in range(5):
            watcher.says(f"{DELIVER}, worker ", err=True)
        code, _, _ = watcher.end()
    assert code == 0


def test_a_copy_that_lived_long_is_started_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predecessors' deaths are forgotten."""
    waits: list[float] = []

    def tell(number: int, name: str | None, news: object) -> None:
        assert isinstance(news, Died)
        assert news.wait is not None
        waits.append(news.wait)

    def work(number: int) -> Any:
        pytest.fail("no worker is to be started")

    supervised = Supervisor(1, work, stop=Stop(), tell=tell, restarts=True)
    (place,) = supervised._places
    for lived in [0.0] * 5 + [LIVED_LONG]:
        place.started = time.monotonic() - lived
        supervised._died(place, Trouble("killed"))
    assert waits[0] <= 1
    assert 8 <= waits[4] <= 16
    assert waits[5] <= 1
