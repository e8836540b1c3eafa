"""Starts ``manage.py processors`` as people do: in a process of its own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.databases import environment
from tests.environments import CHECKOUT
from tests.waiting import PATIENCE


class Install(Protocol):
    def __call__(self, app: str, processors: str | None) -> None: ...


class Ran(NamedTuple):
    code: object
    out: str
    err: str


class Manage(Protocol):
    def __call__(self, *arguments: str) -> Ran: ...


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "django", "processors", *arguments]


def python(
    *arguments: str, stdout: Any = subprocess.PIPE, cwd: Any = CHECKOUT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, without a terminal."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**variables),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def processors(
    *arguments: str, stdout: Any = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``manage.py processors`` to its end, without a terminal."""
    return python("-m", "django", "processors", *arguments, stdout=stdout, **variables)


def shown_on_a_terminal(argv: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run a program on a terminal of its own; return the exit code and what it showed."""
    return on_a_terminal(argv, CHECKOUT, environment(**{"TERM": "xterm-256color", **variables}))


def on_a_terminal(argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other side has gone
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
    return process.returncode, shown.decode()


def besides_lifecycle(err: str) -> str:
    """Return what is on stderr besides the answer to a signal."""
    own = r"^SIG[A-Z]+: finishing the rows at hand\n"
    return re.sub(own, "", err, flags=re.MULTILINE)


@contextmanager
def started(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``manage.py processors`` in a process group of its own; make sure that it ends."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment(**variables),
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
