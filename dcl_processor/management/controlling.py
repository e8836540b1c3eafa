"""``processors pause``, ``resume`` and ``history``: the ledger's actions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from dcl_processor import ledger
from dcl_processor.exceptions import InvalidOption
from dcl_processor.ledger.switch import APP, is_on
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    NOT_FOUND_OUT,
    USAGE_ERROR,
    Subcommand,
    add_names,
    choose,
    whole,
)
from dcl_processor.management.output import Output
from dcl_processor.operator.diagnosis import one_line
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.times import parse_duration, utc_text
from dcl_processor.report.errors import printable
from dcl_processor.sql.errors import is_statement_timeout

if TYPE_CHECKING:
    from dcl_processor.ledger import Record, State

#: Seconds that a statement may take which only reads.
READ_WITHIN = 10.0

#: Records that are shown.
SHOWN = 20


def _add_order(order: str, parser: CommandParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="Processors.")
    parser.add_argument("--all", action="store_true", help="All processors, by one order.")
    if order == "pause":
        parser.add_argument("--reason", default="", help="A text for people.")
        parser.add_argument(
            "--until",
            type=parse_until,
            metavar="TIME",
            help="The end of the pause: a duration from now, such as 2h, or a time, such as "
            "2030-01-31T06:00 (default: until resume).",
        )


def _order(order: str, options: dict[str, Any], output: Output) -> None:
    """Pause or resume, and show what became of it."""
    refuse_without_ledger()
    chosen = choose(options["names"], run_all=options["all"])
    subjects = [ledger.ALL] if options["all"] else [each.name for each in chosen]
    given = {name: options[name] for name in ("reason", "until") if name in options}
    changed: dict[str, bool] = {}
    with _asking(changed):
        for name in subjects:
            changed[name] = getattr(ledger, order)(name, **given)
        with reading(ledger.alias(), READ_WITHIN):
            names = [*subjects, *(each.name for each in chosen)]
            states = {each.name: each for each in ledger.states(names)}
    lines = [f"{_who(name)}: {_outcome(order, it, states[name])}" for name, it in changed.items()]
    if order == "resume" and options["all"]:
        still = [each for each in states.values() if each.name and each.is_paused]
        lines += [f"{each.name}: stays {printable(each.sentence)}" for each in still]
    documents = [
        {**states[each.name].as_dict(), "changed": changed.get(each.name, changed.get(ledger.ALL))}
        for each in chosen
    ]
    output.answer(documents, lines)


def _who(name: str) -> str:
    return name or "all processors"


def _outcome(order: str, changed: bool, state: State) -> str:
    sentence = printable(state.sentence)
    if order == "pause":
        return sentence if changed else f"nothing changed: it was {sentence}"
    if changed:
        return f"resumed, but {sentence}" if sentence else "resumed"
    return f"nothing changed: {sentence or 'it was not paused'}"


def _add_history(parser: CommandParser) -> None:
    add_names(parser)
    parser.add_argument(
        "--limit",
        type=whole("a number from 1 to 10000", 1, 10_000),
        default=SHOWN,
        metavar="NUMBER",
        help=f"Records that are shown for each processor (default: {SHOWN}).",
    )


def _history(options: dict[str, Any], output: Output) -> None:
    """Show what runs and operators did, the newest first."""
    refuse_without_ledger()
    names = options["names"]
    chosen = choose(names) if names else [None]
    with _asking({}), reading(ledger.alias(), READ_WITHIN):
        found = [x for each in chosen for x in ledger.history(each, limit=options["limit"])]
    output.answer([each.as_dict() for each in found], map(_line, found))


def _line(found: Record) -> str:
    who = f"{utc_text(found.at)}  {found.processor}"
    error = f"; {printable(found.error)}" if found.error else ""
    if found.action == "run":
        counts = [f"{number:,} {name}" for name, number in found.counts.items() if name != "stale"]
        tried = ", ".join(counts) or (f"{found.rows:,} rows" if found.rows else "nothing")
        end = printable(found.stopped) or f"no end recorded, seen {utc_text(found.seen_at)}"
        return f"{who}  run by {found.by}: {tried}, {found.rate:.1f} rows/s, {end}{error}"
    if not found.keys:  # of a whole processor
        reason = f": {printable(found.reason)}" if found.reason else ""
        return f"{who}  {found.action} by {found.by}{reason}{error}"
    said = printing.acted(found.rows, found.keys, found.values, found.reason, found.error)
    return f"{who}  {found.action} by {found.by}: {said}"


def refuse_without_ledger() -> None:
    """Raise unless the project has the ledger."""
    if not is_on():
        raise CommandError(
            f"expected {APP!r} in INSTALLED_APPS, and on, where pauses and records are kept, got "
            "none; add it, and run manage.py migrate.",
            returncode=USAGE_ERROR,
        )


@contextmanager
def _asking(changed: Mapping[str, bool]) -> Iterator[None]:
    """Let an error of the tables be one sentence; ``changed``: for whom the order was given."""
    try:
        yield
    except Error as error:
        got = "no answer" if is_statement_timeout(error) else one_line(error)
        done = f" The order was given for {', '.join(map(_who, changed))}." if changed else ""
        raise CommandError(
            f"expected the ledger's tables to answer within {READ_WITHIN:g} s, got: {got}; is the "
            "database up, has manage.py migrate been run, and has another session locked them?"
            f"{done}",
            returncode=NOT_FOUND_OUT,
        ) from error


def parse_until(text: str) -> datetime | timedelta:
    """Return a time to come, or a duration from now; raise ``ArgumentTypeError`` for other text."""
    try:
        at = parse_datetime(text.strip())
    except ValueError:  # such as the 31st of June
        at = None
    if at is not None:
        at = timezone.make_aware(at) if at.tzinfo is None else at
        if at <= datetime.now(UTC):
            raise argparse.ArgumentTypeError(
                f"expected a time to come, got {text!r}, which is over"
            )
        return at
    try:
        length = parse_duration(text)
    except InvalidOption:
        length = 0.0
    if not length:
        raise argparse.ArgumentTypeError(
            f"expected a duration such as 2h or a time such as 2030-01-31T06:00, got {text!r}"
        )
    return timedelta(seconds=length)


_HELP = {
    "pause": "Let no worker start a row, on all machines, until resume.",
    "resume": "End a pause.",
}
PAUSE, RESUME = (
    Subcommand(name, text, partial(_add_order, name), partial(_order, name))
    for name, text in _HELP.items()
)
HISTORY = Subcommand(
    "history", "Show what runs and operators did last.", _add_history, _history, NOT_FOUND_OUT
)
ACTIONS = [PAUSE, RESUME, HISTORY]
