"""``processors pause``, ``resume`` and ``history``: the ledger's actions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator.diagnosis import one_line
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.times import parse_duration, utc_text
from dcl_processor.oversight import LEDGER, has_ledger
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable
from dcl_processor.sql.errors import is_statement_timeout

from . import wording
from .command_line import NOT_FOUND_OUT, USAGE_ERROR, add_names, choose, whole
from .output import Output

if TYPE_CHECKING:
    from dcl_processor.ledger.records import Recorded, RecordedAction

#: Seconds that a statement may take which only reads.
READ_WITHIN = 10.0

#: Records that are shown.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Order:
    """An order for processors; ``name``: the function of ``dcl_processor.ledger`` for it."""

    HELP: str
    name: str

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action's own options."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="Processors.")
        parser.add_argument("--all", action="store_true", help="All processors, by one order.")
        if self.name == "pause":
            parser.add_argument("--reason", default="", help="A text for people.")
            parser.add_argument(
                "--until",
                type=parse_until,
                metavar="TIME",
                help="The end of the pause: a duration from now, such as 2h, or a time, such as "
                "2030-01-31T06:00 (default: until resume).",
            )

    def handle(self, output: Output, options: dict[str, Any]) -> None:
        """Give the order, and show what became of it."""
        refuse_without_ledger()
        from dcl_processor import ledger  # has models

        chosen = choose(options["names"], run_all=options["all"])
        subjects: list[Any] = [ledger.ALL] if options["all"] else chosen
        given = {name: options[name] for name in ("reason", "until") if name in options}
        changed: list[bool] = []
        try:
            for each in subjects:
                done = getattr(ledger, self.name)(each, **given)
                changed.append(done)  # one by one: an error has to name those before it
            with _in_time():
                states = ledger.states(chosen)
        except Error as error:
            raise _unreachable(error, given=subjects[: len(changed)]) from error
        known = changed * len(chosen) if options["all"] else changed
        documents = [
            {**each.as_dict(), "changed": it} for each, it in zip(states, known, strict=True)
        ]
        sentences = {each.name: each.sentence for each in states}
        lines = [
            f"{_who(each)}: {_outcome(self.name, it, sentences.get(_who(each)))}"
            for each, it in zip(subjects, changed, strict=True)
        ]
        if self.name == "resume" and options["all"]:
            still = [each for each in states if each.pause is not None]
            lines += [f"{each.name}: stays {printable(each.sentence)}" for each in still]
        output.answer(documents, lines)


def _add_history(parser: CommandParser) -> None:
    add_names(parser)
    parser.add_argument(
        "--limit",
        type=whole("a number from 1 to 10000", 1, 10_000),
        default=SHOWN,
        metavar="NUMBER",
        help=f"Records that are shown for each processor (default: {SHOWN}).",
    )


def _show_history(output: Output, options: dict[str, Any]) -> None:
    """Show the records, the newest first."""
    refuse_without_ledger()
    names = options["names"]
    chosen: Sequence[BatchProcessor[Any] | None] = choose(names) if names else [None]
    try:
        with _in_time():
            limit = options["limit"]
            found = [each for one in chosen for each in _history(one, limit)]
    except Error as error:
        raise _unreachable(error) from error
    output.answer([each for _, each, _ in found], (line for _, _, line in found))


def _history(
    processor: BatchProcessor[Any] | None, limit: int
) -> list[tuple[datetime, dict[str, Any], str]]:
    """Return when something was done, and what, for JSON and for people; the newest first."""
    from dcl_processor import ledger  # as above

    runs = ledger.history(processor, limit=limit)
    acts = ledger.actions(processor, limit=limit)
    found = [(each.started_at, each.as_dict(), _line(each)) for each in runs]
    found += [(each.at, each.as_dict(), _act_line(each)) for each in acts]
    return sorted(found, key=itemgetter(0), reverse=True)[:limit]


def refuse_without_ledger() -> None:
    """Raise unless the project has the ledger."""
    if not has_ledger():
        raise CommandError(
            f"expected {LEDGER!r} in INSTALLED_APPS, where orders and records are kept, "
            "got none; add it, and run manage.py migrate.",
            returncode=USAGE_ERROR,
        )


def _in_time() -> AbstractContextManager[None]:
    from dcl_processor.ledger.models import alias  # has models

    return reading(alias(), READ_WITHIN)


def _unreachable(error: Error, given: Sequence[Any] = ()) -> CommandError:
    """Return the error of the command; ``given``: for whom the order was given before."""
    if is_statement_timeout(error):
        why = (
            f"expected the ledger's tables to answer within {READ_WITHIN:g} s, got no answer; has "
            "another session locked them?"
        )
    else:
        why = (
            f"expected the ledger's tables to answer, got: {one_line(error)}; is the database up, "
            "and has manage.py migrate been run?"
        )
    done = f" The order was given for {', '.join(map(_who, given))}." if given else ""
    return CommandError(f"{why}{done}", returncode=NOT_FOUND_OUT)


def _who(subject: Any) -> str:
    return subject.name if isinstance(subject, BatchProcessor) else "all processors"


def _outcome(order: str, changed: bool, sentence: str | None) -> str:
    match order, changed:
        case "pause", True:
            return printable(sentence or "paused")
        case "pause", _:
            return f"nothing changed: it was {printable(sentence or 'paused')}"
        case _, True:
            still = f", but {printable(sentence)}" if sentence else ""
            return f"resumed{still}"
        case _:
            return f"nothing changed: {printable(sentence or 'it was not paused')}"


def _line(found: Recorded) -> str:
    tried = [
        f"{number:,} {name}" for name, number in found.counts.items() if number and name != "stale"
    ]
    workers = f", {len(found.workers)} workers" if found.workers else ""
    end = found.stopped if found.state == "finished" else found.state
    if found.state == "lost":
        end = f"lost: no heartbeat since {utc_text(found.heartbeat_at)}"
    error = f"; {printable(found.error)}" if found.error else ""
    nothing = "nothing yet" if found.state == "running" else "nothing"
    return (
        f"{utc_text(found.started_at)}  {found.processor}  {found.kind} on {found.host} "
        f"({found.pid}{workers}): {', '.join(tried) or nothing}, {found.rate:.1f} rows/s, "
        f"{end}{error}"
    )


def _act_line(found: RecordedAction) -> str:
    said = wording.action(found.rows, found.keys, found.values, found.reason, found.error)
    return f"{utc_text(found.at)}  {found.processor}  {found.action} by {found.by}: {said}"


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


PAUSE = Order("Let no worker start a row, on all machines, until resume.", "pause")
RESUME = Order("End a pause.", "resume")
HISTORY = SimpleNamespace(
    HELP="Show what the last runs have done.", add_arguments=_add_history, handle=_show_history
)
