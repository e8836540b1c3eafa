"""How the command shows that its workers are alive: ``--health-file``, and systemd."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.masking import shown
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health, HealthFile
from dcl_processor.processes.visible import Notifier

from . import conditions
from .choosing import USAGE_ERROR

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer
    from dcl_processor.insights.status import Status


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


# --- the one line that Nagios, and what speaks its protocol, reads: a state, a text, and figures


#: Exit codes, which are not those of the command.
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3

NAMES = {OK: "OK", WARNING: "WARNING", CRITICAL: "CRITICAL", UNKNOWN: "UNKNOWN"}

#: Characters of the text: plugins may write 4 kB, the figures included.
LONGEST = 1_000

#: The range of values that meet a condition, by its comparison; no value is below zero.
_RANGES = {">": "{}", ">=": "@{}:", "<": "{}:", "<=": "@~:{}", "=": "@{0}:{0}"}


def line(
    code: int, text: str, found: Sequence[Status] = (), *limits: Sequence[conditions.Condition]
) -> str:
    """Return the line of a state; ``found``: the answers whose figures follow.

    ``limits``: the conditions of a WARNING, and those of a CRITICAL; the first of each name.
    """
    # A bar begins the figures.
    said = shown(text, LONGEST).replace("|", "/")
    ranges = [
        {c.name: _RANGES[c.comparison].format(f"{c.bound}".removesuffix(".0")) for c in limit[::-1]}
        for limit in limits
    ]
    figures = " ".join(_figures(found, ranges))
    return f"DCL {NAMES[code]} - {said}{f' | {figures}' if figures else ''}"


def _figures(found: Sequence[Status], ranges: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for each in found:
        for name, answer in each.answers.items():
            label = name if len(found) == 1 else f"{each.name}.{name}"
            if (value := _value(name, answer)) is not None:
                figure = ";".join([value, *(each.get(name, "") for each in ranges)])
                yield f"{_quoted(label)}={figure.rstrip(';')}"


def _value(name: str, answer: Answer[Any]) -> str | None:
    if answer.how in ("unknown", "not recorded"):
        return None
    if name in conditions.AGES:
        return f"{answer.value.seconds if answer.value else 0:.0f}s"
    if name == "locked":
        return str(answer.value and answer.value.rows)
    # One more than was counted, at least.
    return str(int(answer.value or 0) + (answer.how == "more than"))


def _quoted(label: str) -> str:
    return label if re.fullmatch(r"[\w.-]+", label) else "'{}'".format(label.replace("'", "''"))
