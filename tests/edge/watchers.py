"""Starts ``manage.py processors run --watch``, and follows what it says."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO

from tests.edge.manage import started
from tests.models import Parcel
from tests.waiting import PATIENCE, take, until

#: Seconds: a watcher that has this interval does not look again while a test runs.
SELDOM = "600"


class Watcher:
    """A watcher in a process of its own, whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        #: What is in no report, and comes from any worker at any time.
        self.operations: list[str] = []
        #: Its answer to a signal.
        self.about_itself: list[str] = []
        self.out = _follow(process.stdout, [], self.about_itself)
        self.err = _follow(process.stderr, self.operations, self.about_itself)

    def says(self, start: str, *, err: bool = False) -> str:
        """Wait for the next line, which is to begin like this, and return it."""
        line = take(self.err if err else self.out, f"a line {start!r}")
        assert line.startswith(start), line
        return line

    def end(self, signum: signal.Signals | None = signal.SIGTERM) -> tuple[int, str, str]:
        """Send the signal, if any; return the exit code, and what was said and not yet read."""
        if signum is not None:
            self.process.send_signal(signum)
        code = self.process.wait(PATIENCE)
        return code, _rest(self.out), _rest(self.err)


Lines = SimpleQueue[str]


@contextmanager
def watching(*arguments: str, **variables: str) -> Iterator[Watcher]:
    with started("run", *arguments, **variables) as process:
        yield Watcher(process)


def _follow(stream: IO[str] | None, operations: list[str], about_itself: list[str]) -> Lines:
    lines: Lines = SimpleQueue()
    assert stream is not None
    pipe = stream

    def follow() -> None:
        with suppress(ValueError):  # closed, by a test that has ended before it was read
            for line in pipe:
                if re.search(r"was at work when its process died|LISTEN failed", line):
                    operations.append(line.rstrip("\n"))
                elif re.match(r"SIG[A-Z]+: finishing", line):
                    about_itself.append(line.rstrip("\n"))
                else:
                    lines.put(line.rstrip("\n"))
        lines.put("")  # the end

    threading.Thread(target=follow, daemon=True).start()
    return lines


def _rest(lines: Lines) -> str:
    return "\n".join(iter(lambda: take(lines, "the end of the output"), ""))


def parcels(*notes: str) -> list[int]:
    return [Parcel.objects.create(note=note).pk for note in notes]


def unsent() -> set[int]:
    return set(Parcel.objects.filter(sent=False).values_list("pk", flat=True))


def wait_until_sent() -> None:
    until(lambda: not unsent(), "the parcels to be sent")
