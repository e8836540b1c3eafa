"""``processors list``: every processor in one line; ``show``: why a row is handled, or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.operator.diagnosis import explain
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

from . import wording
from .command_line import NOT_FOUND_OUT, add_time_limit, choose, keys, named_or_all
from .output import Output
from .status import joined, unknown

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer
    from dcl_processor.insights.locks import Locked
    from dcl_processor.insights.row import Row
    from dcl_processor.insights.status import Status

#: Seconds that each question may take.
LIST_TIMEOUT = 1.0

#: The states of rows that a processor's state names.
STATES = ("in_doubt", "given_up", "in_progress")


def _add_limit(parser: CommandParser) -> None:
    """Add the action's own options."""
    add_time_limit(parser, default=LIST_TIMEOUT)


def _list(output: Output, options: dict[str, Any]) -> None:
    """Show every processor, and why the rows of some could not be counted."""
    from dcl_processor.insights.status import status  # not for other actions

    chosen, left_out = named_or_all([])
    down: dict[str, str] = {}
    using, seconds = options["using"], options["timeout"]
    # "paused" without a query if there is no ledger.
    wanted = ("pending", "oldest", "paused", *STATES)
    found = [
        (each, status(each, using=using, seconds=seconds, down=down, only=wanted))
        for each in chosen
    ]
    known = [each for _, each in found]
    output.answer([{**each.as_dict(), "state": states(each)} for each in known], _list_lines(found))
    output.left_out(left_out)
    if not_known := unknown(known, left_out):
        raise CommandError(joined(not_known), returncode=NOT_FOUND_OUT)


def states(found: Status) -> list[str]:
    """Return the processor's states; "?" if one could not be found out."""
    there = ["paused"] if found.answers["paused"].value else []
    there += [wording.LABELS[name] for name in STATES if found.answers[name].value]
    if any(each.how == "unknown" for each in found.answers.values()):
        return [*there, "?"]
    return there or ["waiting" if found.answers["pending"].value else "idle"]


def _list_lines(found: Sequence[tuple[BatchProcessor[Any], Status]]) -> Iterator[str]:
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


# --- one row


#: The exit code if there is no such row.
NOT_THERE = 1


def _add_row(parser: CommandParser) -> None:
    """Add the action's own options."""
    parser.add_argument("name", metavar="NAME", help="A processor.")
    parser.add_argument(
        "pk", metavar="PK", help="A primary key; write a composite one with commas."
    )
    add_time_limit(parser)


def _show(output: Output, options: dict[str, Any]) -> None:
    """Show the row."""
    from dcl_processor.insights import row as insights  # not for other actions

    (processor,) = choose([options["name"]])
    (pk,) = keys(processor, [options["pk"]], using=options["using"])
    try:
        row = insights.show(processor, pk, using=options["using"], seconds=options["timeout"])
    except Exception as error:
        sentence = explain(error, processor, options["using"])
        raise CommandError(sentence, returncode=NOT_FOUND_OUT) from error
    output.answer(row.as_dict(), lines(row))
    named = f"row {printable(options['pk'])}"
    if not row.is_complete:
        raise CommandError(f"{named}: {row.reason}.", returncode=NOT_FOUND_OUT)
    if row.locked is not None and row.locked.how == "unknown":
        raise CommandError(
            f"{named}: who has locked it could not be found out: {row.locked.why}.",
            returncode=NOT_FOUND_OUT,
        )
    if not row.exists:
        raise CommandError(f"{named}: {row.reason}.", returncode=NOT_THERE)


def lines(row: Row) -> Iterator[str]:
    """Yield the lines about a row."""
    from dcl_processor.insights.rows import key_text  # as above

    yield f"{row.name}, row {printable(key_text(row.pk))}: {row.reason}"
    for name, label in wording.PARTS.items():
        if (part := row.parts.get(name)) is not None:
            yes_or_no = "yes" if part.value else "no"
            yield f"  {label:<18} {part.missing or yes_or_no}"
    for name, value in row.columns.items():
        yield f"  {name:<18} {_value(value)}"
    if row.locked is not None:
        yield from _holders(row.locked)


def _value(value: Any) -> str:
    from dcl_processor.insights.answer import document_of

    return printable(str(document_of(value)))[:500] or "(empty)"


def _holders(answer: Answer[Locked]) -> Iterator[str]:
    found = answer.value
    if found is None:
        texts = [answer.missing]
    else:
        texts = [f"by {wording.holder(each)}" for each in found.holders] or ["no"]
    return wording.labelled("locked", 18, *texts)


LIST = SimpleNamespace(
    HELP="Show each processor with its pending rows, their age, and its state.",
    add_arguments=_add_limit,
    handle=_list,
)
SHOW = SimpleNamespace(
    HELP="Show why a row is handled, or not: its condition, its columns, and who has locked it.",
    add_arguments=_add_row,
    handle=_show,
)
