"""How the command shows that its workers are alive: ``--health-file``, and systemd."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from django.core.management.base import CommandError, CommandParser

from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health, HealthFile
from dcl_processor.processes.visible import Notifier

from .choosing import USAGE_ERROR


def add_arguments(parser: CommandParser) -> None:
    """Add the options of a command that is watched from outside."""
    parser.add_argument(
        "--health-file",
        type=Path,
        metavar="PATH",
        help="Write this file again each second while all workers are alive; "
        "python -m dcl_processor.alive PATH looks at it.",
    )


@contextmanager
def published(
    names: Sequence[str], stop: Stop, path: Path | None, *, owns_process: bool
) -> Iterator[Health]:
    """Show the health of this command in the block; at its end, remove the file.

    ``owns_process``: only then systemd's variables are for this command, and are removed.
    """
    notifier = Notifier.taken_from(os.environ) if owns_process else None
    file = None if path is None else HealthFile(path)
    health = Health(names, stop, file, notifier)
    try:
        health.ready()
    except OSError as error:
        raise CommandError(
            f"expected --health-file to name a file that can be written, got {path}: "
            f"{error.strerror}; create its folder, or choose another one.",
            returncode=USAGE_ERROR,
        ) from error
    try:
        yield health
    finally:
        health.close()
