"""``processors list``: every processor in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor import registry
from dcl_processor.processor import BatchProcessor

from . import wording
from .choosing import NOT_FOUND_OUT, add_time_limit, choose
from .output import Output
from .status import joined, unknown

if TYPE_CHECKING:
    from dcl_processor.insights.status import Status

HELP = "Show each processor with its pending rows, their age, and its state."

#: Seconds that each question may take.
TIMEOUT = 1.0

#: The states of a processor that has rows in these conditions.
STATES = {"in_doubt": "in doubt", "given_up": "given up", "in_progress": "in progress"}


def add_arguments(parser: CommandParser) -> None:
    """Add the action's own options."""
    add_time_limit(parser, default=TIMEOUT)


def handle(output: Output, options: dict[str, Any]) -> None:
    """Show every processor, and why the rows of some could not be counted."""
    from dcl_processor.insights.status import status  # not for other actions

    down: dict[str, str] = {}
    using, seconds = options["using"], options["timeout"]
    # "paused" without a query if there is no ledger.
    wanted = ("pending", "oldest", "paused", *STATES)
    found = [
        (each, status(each, using=using, seconds=seconds, down=down, only=wanted))
        for each in choose([], run_all=True)
    ]
    known = [each for _, each in found]
    output.answer([{**each.as_dict(), "state": states(each)} for each in known], _lines(found))
    left_out = registry.broken()
    output.left_out(left_out)
    if not_known := unknown(known, left_out):
        raise CommandError(joined(not_known), returncode=NOT_FOUND_OUT)


def states(found: Status) -> list[str]:
    """Return the processor's states; "?" if one could not be found out."""
    there = ["paused"] if found.answers["paused"].value else []
    there += [words for name, words in STATES.items() if found.answers[name].value]
    if any(each.how == "unknown" for each in found.answers.values()):
        return [*there, "?"]
    return there or ["waiting" if found.answers["pending"].value else "idle"]


def _lines(found: Sequence[tuple[BatchProcessor[Any], Status]]) -> Iterator[str]:
    width = max((len(processor.name) for processor, _ in found), default=0)
    rows = [(processor, each, ", ".join(states(each))) for processor, each in found]
    wide = max(len("state"), *(len(state) for *_, state in rows)) if rows else 0
    yield f"pending  oldest  {'state':<{wide}}  processor"
    for processor, each, state in rows:
        pending = wording.short(each.answers["pending"])
        age = wording.age(each.answers["oldest"])
        about = (processor.__doc__ or "").strip().partition("\n")[0]
        line = f"{pending:>7}  {age:>6}  {state:<{wide}}  {processor.name:<{width}}  {about}"
        yield line.rstrip()
