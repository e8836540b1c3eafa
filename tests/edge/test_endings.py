"""Workers that hang after their last message hold up neither the others nor their supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dcl_processor.execution import calls
from dcl_processor.processes import child, monitor, supervisor
from dcl_processor.processes.child import SOON, Work, end_all
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.monitor import OwnTime
from dcl_processor.processes.news import Died, Worker
from dcl_processor.processes.results import Outcomes
from dcl_processor.processes.supervisor import Supervisor
from dcl_processor.report import Report
from dcl_processor.watch.polling import BACKOFF, POLL_IDLE, Backoff
from tests.edge.manage import python
from tests.hanging import works

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("installed")]

#: Seconds after which the workers are let go that a fault of the supervisor would leave hanging.
BOUND = 80.0


def supervised(
    folder: Path,
    *all_work: Work,
    restart: Backoff | None = BACKOFF,
    observe: Callable[[Sequence[Worker]], None] = lambda _: None,
) -> tuple[bool, list[tuple[int, Died]]]:
    """Run one worker for each work; return what the run returned, and the deaths by number.

    ``observe`` is called with the workers whenever the supervisor shows their health.
    """
    deaths: list[tuple[int, Died]] = []
    deadline = time.monotonic() + BOUND

    def tell(number: int, _: str | None, event: object) -> None:
        assert isinstance(event, Died)
        deaths.append((number, event))

    def bounded(workers: Sequence[Worker]) -> None:
        if time.monotonic() > deadline:
            (folder / "end").touch()
        observe(workers)

    had_work = Supervisor(
        len(all_work),
        lambda number: all_work[number - 1],
        stop=Stop(),
        tell=tell,
        restart=restart,
        observe=bounded,
    ).run()
    return had_work, deaths


def hanging(folder: Path) -> list[int]:
    """Return the processes that hang."""
    pids = (int(path.name.split()[1]) for path in folder.glob("hangs *"))
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_workers_that_hang_hold_up_no_restart_and_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is killed before another worker was restarted and the health was shown."""
    monkeypatch.setattr(child, "EXIT_WITHIN", 10 * BOUND)
    beside: list[list[int]] = []
    shown: list[list[tuple[str, bool]]] = []

    def observe(workers: Sequence[Worker]) -> None:
        if (tmp_path / "successor").exists() and not beside:
            beside.append(hanging(tmp_path))
            shown.append([(each.state, each.is_alive) for each in workers if each.number > 1])
            (tmp_path / "end").touch()

    had_work, deaths = supervised(
        tmp_path,
        partial(works.die_beside_hanging_ones, tmp_path, 3),
        *[partial(works.hang_at_exit, tmp_path)] * 3,
        observe=observe,
    )
    assert [len(pids) for pids in beside] == [3]
    assert shown == [[("ends", True)] * 3]
    ((number, death),) = deaths
    assert (number, had_work) == (1, True)
    assert death.trouble.sentence.startswith("killed by SIGKILL")


def test_a_worker_that_hangs_is_killed_and_its_last_message_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "EXIT_WITHIN", 0.3)
    work = partial(works.hang_at_exit, tmp_path)
    assert supervised(tmp_path, work, work, restart=None) == (True, [])
    assert not (tmp_path / "end").exists()


def test_a_worker_that_closes_its_pipe_and_hangs_makes_no_busy_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its files, which are ready to be read from then on."""
    waits: set[tuple[int, float]] = set()

    def wait(files: list[Any], pause: float) -> list[Any]:
        waits.add((len(files), pause))
        return connection.wait(files, pause)

    monkeypatch.setattr(child, "EXIT_WITHIN", 0.3)
    monkeypatch.setattr(supervisor, "connection", SimpleNamespace(wait=wait))
    work = partial(works.close_the_pipe_and_hang, tmp_path)
    _, ((_, death),) = supervised(tmp_path, work, restart=None)
    assert death.trouble.sentence == (
        "killed by the supervisor: it closed its pipe, and did not end within 0.3 s; its "
        "committed work stays, but is not counted"
    )
    assert waits == {(1, POLL_IDLE), (0, SOON)}


@pytest.fixture
def lost_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose each kill, as with a process that waits in the kernel, where no signal reaches it."""
    monkeypatch.setattr("subprocess.Popen.kill", lambda *_: None)
    monkeypatch.setattr(child, "EXIT_WITHIN", 0.1)
    monkeypatch.setattr(child, "DIES_WITHIN", 0.1)


def let_end(folder: Path) -> int:
    """Let the process end that hangs, and return it; its supervisor has left it behind."""
    (pid,) = hanging(folder)
    (folder / "end").touch()
    assert os.waitpid(pid, 0)[0] == pid
    return pid


@pytest.mark.usefixtures("lost_kills")
def test_a_worker_that_has_failed_and_cannot_be_killed_has_a_successor(tmp_path: Path) -> None:
    """Its work has ended, so that the successor cannot meet it."""
    had_work, deaths = supervised(tmp_path, partial(works.fail_and_hang_at_exit, tmp_path))
    let_end(tmp_path)
    ((_, death),) = deaths
    assert had_work
    assert death.trouble.sentence == "ArithmeticError: on purpose"
    assert death.wait is not None


@pytest.mark.usefixtures("lost_kills")
def test_a_worker_that_has_not_ended_its_work_and_cannot_be_killed_has_none(tmp_path: Path) -> None:
    _, deaths = supervised(tmp_path, partial(works.close_the_pipe_and_hang, tmp_path))
    pid = let_end(tmp_path)
    ((_, death),) = deaths
    assert str(death) == (
        f"process {pid} was killed 0.1 s ago, and has not ended: it closed its pipe, and did not "
        "end within 0.1 s; no other process takes its place"
    )


def test_a_worker_that_is_killed_after_its_report_has_no_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its work is done, and the report of a successor, without rows, would replace its."""
    outcomes = Outcomes("hanging.report", [None], None, lambda *_: None)
    deaths: list[Died] = []

    def tell(number: int, name: str | None, event: Any) -> None:
        outcomes.tell(number, name, event)
        if isinstance(event, Died):
            deaths.append(event)
        else:
            monkeypatch.setattr(monitor, "KILLED_SILENT", 0.2)
            monkeypatch.setattr(calls, "GRACE", 0.1)

    Supervisor(
        1,
        lambda _: partial(works.report_and_stop, tmp_path),
        stop=Stop(),
        tell=tell,
        limit=0.1,
        goes_on=True,
    ).run()
    (death,) = deaths
    assert death.trouble.sentence.startswith("killed by the supervisor: it has not moved")
    assert death.wait is None
    assert outcomes.in_order() == [Report(name="hanging.report", processed=3)]


@pytest.fixture
def ignored_sigchld() -> Iterator[None]:
    """Ignore SIGCHLD, as some launchers do: the system then keeps no exit code of a child."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    assert signal.signal(signal.SIGCHLD, before) is signal.SIG_IGN


@pytest.mark.usefixtures("ignored_sigchld")
def test_the_end_of_a_worker_is_noticed_although_sigchld_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is killed after its end, when its pid may be that of another process."""
    kills: list[Any] = []
    monkeypatch.setattr("subprocess.Popen.kill", lambda *a: kills.append(a))
    monkeypatch.setattr(child, "DIES_WITHIN", 0.1)
    work = partial(works.die_beside_hanging_ones, tmp_path, 0)
    had_work, ((_, death),) = supervised(tmp_path, work)
    assert had_work
    assert death.trouble.sentence.startswith("killed by SIGKILL")
    assert death.wait is not None
    assert (tmp_path / "successor").exists()
    assert kills == []


def test_all_workers_are_ended_in_the_same_seconds() -> None:
    """Each is asked each time: one that cannot be killed does not hold up the kill of another."""
    steps: list[tuple[str, int]] = []

    class Ending:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getattr__(self, step: str) -> Callable[..., bool]:
            def note(*_: float) -> bool:
                steps.append((step, self.number))
                return steps.count((step, self.number)) >= 3

            return note

    end_all([Ending(1), Ending(2)], OwnTime())  # type: ignore[list-item]  # it has its methods
    names = ["begin_end", "has_gone", "has_gone", "has_gone", "close"]
    assert steps == [(each, number) for each in names for number in (1, 2)]


#: A child that gets the order to stop at once when its work has ended, and waits for the signal.
LATE = """
import multiprocessing, threading
from dcl_processor.processes import child

control, parent = multiprocessing.Pipe(duplex=False)

class Results(child.Results):
    def send(self, name, event):
        if isinstance(event, child.Ended):
            parent.send(child.STOP_AT_ONCE)
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join()
        super().send(name, event)

child.Results = Results
results, beats = (multiprocessing.Pipe(duplex=False) for _ in range(2))
child.do(lambda stop, send: False, {}, control, results[1], beats[1])
while not isinstance(event := results[0].recv()[1], child.Ended):
    pass
print("sent")
"""


def test_a_signal_behind_the_end_of_the_work_does_not_keep_it_from_being_sent() -> None:
    """Forced: the order to stop at once comes between the end of the work and the last message."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}
    ended = python("-c", LATE, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sent\n", "")
