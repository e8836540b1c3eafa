"""The work of children that do not end as they should; each needs a folder of its test's own.

They end when the file ``end`` is in the folder, or when their supervisor has gone.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from functools import partial
from pathlib import Path

from dcl_processor.processes.child import Send
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.report.report import Report


def hang(folder: Path) -> None:
    (folder / f"hangs {os.getpid()}").touch()
    supervisor = os.getppid()
    while os.getppid() == supervisor and not (folder / "end").exists():
        time.sleep(0.01)


def hang_at_exit(folder: Path, _: Stop, __: Send) -> bool:
    """Return, and hang after the last message."""
    atexit.register(partial(hang, folder))
    return True


def die_beside_hanging_ones(folder: Path, number: int, _: Stop, __: Send) -> bool:
    """Die when so many others hang; the successor says so, and returns."""
    if is_first(folder):
        while len(list(folder.glob("hangs *"))) < number:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "successor").touch()
    return True


def report_and_stop(folder: Path, _: Stop, send: Send) -> bool:
    """Send a report, and stop as under SIGSTOP; a successor would send another one, and return."""
    is_successor = not is_first(folder)
    send("hanging.report", Report(name="hanging.report", processed=0 if is_successor else 3))
    if not is_successor:
        os.kill(os.getpid(), signal.SIGSTOP)
    return True


def is_first(folder: Path) -> bool:
    """Return whether no process has asked this before."""
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
