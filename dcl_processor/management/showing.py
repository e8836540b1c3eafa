"""``processors show``: why one row is handled, or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.diagnosis import explain
from dcl_processor.errors import printable

from . import wording
from .choosing import NOT_FOUND_OUT, add_time_limit, choose, keys
from .output import Output

if TYPE_CHECKING:
    from dcl_processor.insights.row import Row

HELP = "Show why a row is handled, or not: its condition, its columns, and who has locked it."

#: The exit code if there is no such row.
NOT_THERE = 1

#: The parts of the question, as they are shown.
PARTS = {
    "pending": "in pending",
    "due": "its time has come",
    "attempts_left": "attempts left",
    "lease_free": "not leased",
    "unclaimed": "not claimed",
    "key_free": "its group is free",
    "given_up": "given up",
}


def add_arguments(parser: CommandParser) -> None:
    """Add the action's own options."""
    parser.add_argument("name", metavar="NAME", help="A processor.")
    parser.add_argument(
        "pk", metavar="PK", help="A primary key; write a composite one with commas."
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="Wait for the row's lock for 0.2 s, which finds every holder.",
    )
    add_time_limit(parser)


def handle(output: Output, options: dict[str, Any]) -> None:
    """Show the row."""
    from dcl_processor.insights import row as insights  # not for other actions

    (processor,) = choose([options["name"]], run_all=False, left_out=NOT_FOUND_OUT)
    (pk,) = keys(processor, [options["pk"]], using=options["using"], unknown=NOT_FOUND_OUT)
    try:
        row = insights.show(
            processor,
            pk,
            using=options["using"],
            seconds=options["timeout"],
            with_probe=options["probe"],
        )
    except Exception as error:
        sentence = explain(error, processor, options["using"])
        raise CommandError(sentence, returncode=NOT_FOUND_OUT) from error
    output.answer(row.as_dict(), lines(row))
    named = f"row {printable(options['pk'])}"
    if not row.is_complete:
        raise CommandError(f"{named}: {row.reason}.", returncode=NOT_FOUND_OUT)
    for answer in (row.locked, row.probed):
        if answer is not None and answer.how == "unknown":
            raise CommandError(
                f"{named}: who has locked it could not be found out: {answer.why}.",
                returncode=NOT_FOUND_OUT,
            )
    if not row.exists:
        raise CommandError(f"{named}: {row.reason}.", returncode=NOT_THERE)


def lines(row: Row) -> Iterator[str]:
    """Yield the lines about a row."""
    from dcl_processor.insights.rows import key_text  # as above

    yield f"{row.name}, row {printable(key_text(row.pk))}: {row.reason}"
    for name, label in PARTS.items():
        if (part := row.parts.get(name)) is not None:
            yield f"  {label:<18} {_yes_or_no(part)}"
    for name, value in row.columns.items():
        yield f"  {name:<18} {_value(value)}"
    if row.locked is not None:
        yield from _holders("locked", row.locked)
    if row.probed is not None:
        yield from _holders("locked (probe)", row.probed)


def _yes_or_no(part: Any) -> str:
    if part.value is None:
        return wording.number(part)
    return "yes" if part.value else "no"


def _value(value: Any) -> str:
    from dcl_processor.insights.answer import document_of

    return printable(str(document_of(value)))[:500] or "(empty)"


def _holders(label: str, answer: Any) -> Iterator[str]:
    found = answer.value
    if found is None:
        texts = [wording.number(answer)]
    else:
        is_locked = getattr(found, "is_locked", None)
        texts = [f"by {wording.holder(each)}" for each in found.holders]
        texts = texts or [
            "yes, by a session that the database does not name" if is_locked else "no"
        ]
    return wording.labelled(label, 18, *texts)
