"""Workers that hang after their last message hold up neither the others nor their supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcl_processor.engine import calls
from dcl_processor.processes import child, monitor
from dcl_processor.processes.child import Work
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.news import Died, Worker
from dcl_processor.processes.pool import Outcomes
from dcl_processor.processes.supervisor import Supervisor
from dcl_processor.report.report import Report
from tests.edge.manage import python
from tests.hanging import works

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("installed")]

#: Seconds after which the workers are let go that a fault of the supervisor would leave hanging.
BOUND = 80.0


def supervised(
    folder: Path,
    *all_work: Work,
    restarts: bool = True,
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
        restarts=restarts,
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
    assert supervised(tmp_path, work, work, restarts=False) == (True, [])
    assert not (tmp_path / "end").exists()


def test_a_worker_that_is_killed_after_its_report_has_no_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its work is done, and the report of a successor, without rows, would replace its."""
    outcomes = Outcomes("hanging.report", [None], None)
    deaths: list[Died] = []

    def tell(number: int, name: str | None, event: Any) -> None:
        outcomes.tell(number, name, event)
        if isinstance(event, Died):
            deaths.append(event)
        else:
            monkeypatch.setattr(monitor, "KILLED_SILENT", 0.2)
            monkeypatch.setattr(calls, "GRACE", 0.1)

    Supervisor(
        1, lambda _: partial(works.report_and_stop, tmp_path), stop=Stop(), tell=tell, limit=0.1
    ).run()
    (death,) = deaths
    assert death.trouble.sentence.startswith("killed: it has not moved")
    assert death.wait is None
    assert outcomes.in_order() == [Report(name="hanging.report", processed=3)]


#: A child that gets the order to stop at once when its work has ended, and waits for the signal.
LATE = """
import multiprocessing, threading
from dcl_processor.processes import child

parent, own = multiprocessing.Pipe()

class Outbox(child.Outbox):
    def send(self, name, event):
        if isinstance(event, child.Ended):
            parent.send(child.STOP_AT_ONCE)
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join()
        super().send(name, event)

child.Outbox = Outbox
child.do(lambda stop, send: False, {}, own)
inbox = child.Inbox(parent)
while not any(isinstance(event, child.Ended) for _, event in inbox.take()):
    pass
print("sent")
"""


def test_a_signal_behind_the_end_of_the_work_does_not_keep_it_from_being_sent() -> None:
    """Forced: the order to stop at once comes between the end of the work and the last message."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}
    ended = python("-c", LATE, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sent\n", "")
