"""``processors pause``, ``resume`` and ``history``: the ledger's actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error
from django.utils.dateparse import parse_datetime

from dcl_processor import ledger
from dcl_processor.exceptions import InvalidOption
from dcl_processor.ledger import APP, is_on
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    NOT_FOUND_OUT,
    Subcommand,
    add_names,
    add_names_or_all,
    choose,
    duration,
    misuse,
    whole,
)
from dcl_processor.management.output import Output
from dcl_processor.operator.diagnosis import one_line
from dcl_processor.operator.times import reading, utc_text
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.ledger import Record, State

#: Seconds that a statement may take which only reads.
READ_WITHIN = 10.0

#: Records that are shown.
SHOWN = 20


def _add_pause(parser: CommandParser) -> None:
    _add_resume(parser)
    parser.add_argument("--reason", default="", help="A text for people.")
    text = "The end of the pause: a duration from now, such as 2h, or a time, such as "
    text += "2030-01-31T06:00 (default: until resume)."
    parser.add_argument("--until", type=parse_until, metavar="TIME", help=text)


def _add_resume(parser: CommandParser) -> None:
    add_names_or_all(parser, "All processors, by one order.")


def _pause(options: dict[str, Any], output: Output) -> None:
    pause = partial(ledger.pause, reason=options["reason"], until=options["until"])
    _order(pause, options, output)


def _resume(options: dict[str, Any], output: Output) -> None:
    _order(ledger.resume, options, output)


def _order(order: Callable[[str], bool], options: dict[str, Any], output: Output) -> None:
    """Pause or resume, and show how the processors stand then."""
    names = [each.name for each in choose(options["names"])]
    with _ledger():
        for name in [ledger.ALL] if options["all"] else names:
            order(name)
        with reading(ledger.alias(), READ_WITHIN):
            states = ledger.states(names)
    output.answer([each.as_dict() for each in states], map(_standing, states))


def _standing(state: State) -> str:
    return f"{state.name}: {printable(state.sentence) or 'not paused'}"


def _add_history(parser: CommandParser) -> None:
    add_names(parser)
    text = f"Records that are shown for each processor (default: {SHOWN})."
    how: dict[str, Any] = {"default": SHOWN, "metavar": "NUMBER"}
    parser.add_argument("--limit", type=whole(1, 10_000), help=text, **how)


def _history(options: dict[str, Any], output: Output) -> None:
    """Show what runs and operators did, the newest first."""
    names = options["names"]
    chosen = choose(names) if names else [None]
    with _ledger(), reading(ledger.alias(), READ_WITHIN):
        found = [x for each in chosen for x in ledger.history(each, limit=options["limit"])]
    output.answer([each.as_dict() for each in found], map(_line, found))


def _line(found: Record) -> str:
    said = printing.acted(found.rows, found.keys, found.values, found.reason, found.error)
    if found.action == "run":
        counts = [f"{number:,} {name}" for name, number in found.counts.items() if name != "stale"]
        tried = ", ".join(counts) or "nothing"
        end = found.stopped or f"no end recorded, seen {utc_text(found.seen_at)}"
        tried += f", {found.rate:.1f} rows/s, {end}"
        said = printing.acted(0, "", tried, found.error)
    return f"{utc_text(found.at)}  {found.processor}  {found.action} by {found.by}{said}"


@contextmanager
def _ledger() -> Iterator[None]:
    """Let a missing ledger, an unusable value, and an error of its tables be one sentence."""
    if not is_on():
        raise misuse(
            f"expected {APP!r} in INSTALLED_APPS, and on, where pauses and records are kept, got "
            "none; add it, and run manage.py migrate."
        )
    try:
        yield
    except InvalidOption as error:
        raise misuse(str(error)) from error
    except Error as error:
        raise CommandError(
            f"expected the ledger's tables to answer within {READ_WITHIN:g} s, got: "
            f"{one_line(error)}; is the database up, has manage.py migrate been run, and has "
            "another session locked them?",
            returncode=NOT_FOUND_OUT,
        ) from error


def parse_until(text: str) -> datetime | timedelta:
    """Return a time, or a duration from now; raise ``ArgumentTypeError`` for other text."""
    try:
        at = parse_datetime(text.strip())
    except ValueError:  # such as the 31st of June
        at = None
    return at or timedelta(seconds=duration()(text))


ACTIONS = [
    Subcommand(
        "pause", "Let no worker start a row, on all machines, until resume.", _add_pause, _pause
    ),
    Subcommand("resume", "End a pause.", _add_resume, _resume),
    Subcommand("history", "Show what runs and operators did last.", _add_history, _history),
]
