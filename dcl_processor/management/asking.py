"""``processors list``, ``status``, ``rows``, ``show``, ``explain``, ``doctor``: they only read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.management import conditions, printing
from dcl_processor.management.command_line import (
    FAILED,
    NOT_FOUND_OUT,
    Subcommand,
    add_age,
    add_names,
    add_question,
    choose,
    choose_and_left_out,
    keys,
)
from dcl_processor.management.output import Output
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import explain
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.insights.rows import Listed
    from dcl_processor.insights.status import Status

#: The states of rows that ``rows`` shows, besides those in doubt.
SHOWN = {"given_up": "failed for good", "due": "to be tried now", "later": "waiting for a time"}


# --- list and status


def _add_status(parser: CommandParser) -> None:
    add_names(parser)
    text = "End with 1 if this holds for a processor, such as 'in_doubt>0' or 'oldest>15m'."
    how: dict[str, Any] = {"action": "append", "default": [], "metavar": "CONDITION"}
    parser.add_argument("--fail-if", type=conditions.parse, help=text, **how)
    add_age(parser, "The age from which a claim counts as in doubt")
    add_question(parser)


def _list(options: dict[str, Any], output: Output) -> None:
    """Show each processor in a line, in the order of the apps."""
    from dcl_processor.insights.status import LINE  # not for a run

    chosen, left_out = choose_and_left_out([])
    found = _ask(chosen, options, only=LINE)
    about = printing.first_lines(chosen)
    output.answer(_documents(found), printing.table(found, printing.OF_LIST, about))
    _refuse_unknown(output, found, left_out)


def _status(options: dict[str, Any], output: Output) -> None:
    """Show the named processors, or a line for each one; or check the conditions."""
    from dcl_processor.insights.status import LINE, troubles_first  # not for a run

    names, wanted = options["names"], options["fail_if"]
    chosen, left_out = choose_and_left_out(names)
    if wanted:
        found = _ask(chosen, options, wanted, only=[each.name for each in wanted])
        lines: Iterable[str] = ()
    elif names or output.as_json:
        found = _ask(chosen, options)
        lines = (line for each in found for line in printing.status(each))
    else:
        found = troubles_first(_ask(chosen, options, only=LINE))
        lines = printing.table(found, printing.OF_STATUS, {})
    met = [*conditions.met(found, wanted)]
    output.answer(_documents(found), lines)
    if met:
        raise CommandError(f"{'; '.join(met)}.", returncode=FAILED)
    _refuse_unknown(output, found, left_out)


def _ask(
    chosen: Iterable[BatchProcessor[Any]],
    options: dict[str, Any],
    wanted: Iterable[conditions.Condition] = (),
    *,
    only: Sequence[str] | None = None,
) -> list[Status]:
    from dcl_processor.insights import status as insights  # not for a run
    from dcl_processor.insights.status import MOST

    ask = partial(
        insights.status,
        using=options["using"],
        seconds=options["timeout"],
        doubt_after=options.get("in_doubt"),
        # Counted far enough to compare; a bound that is an age may be above it.
        most=max([MOST, *(int(each.bound) for each in wanted)]),
        only=only,
        # A database that does not answer is asked once.
        down={},
    )
    return [ask(processor) for processor in chosen]


def _documents(found: Iterable[Status]) -> list[dict[str, Any]]:
    return [each.as_dict() for each in found]


def _refuse_unknown(
    output: Output, found: Iterable[Status], left_out: Sequence[registry.Broken]
) -> None:
    """Raise for what was not found out, with each reason once."""
    output.left_out(left_out)
    whys = [
        f"{each.name}: {answer.missing}".rstrip(".")  # a reason may be a sentence
        for each in found
        for answer in each.answers.values()
        if answer.how == "unknown"
    ]
    whys += [f"{each.app}: its processors cannot be imported" for each in left_out]
    if whys:
        raise CommandError(f"{'; '.join(dict.fromkeys(whys))}.", returncode=NOT_FOUND_OUT)


# --- rows


def _add_rows(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")
    state = parser.add_mutually_exclusive_group(required=True)
    add_age(state, "Rows whose claim was never settled, from this age")
    for name, what in SHOWN.items():
        how: dict[str, Any] = {"action": "store_const", "const": name, "dest": "state"}
        state.add_argument(f"--{name.replace('_', '-')}", help=f"Rows {what}.", **how)
    parser.set_defaults(state="in_doubt")
    add_question(parser)


def _rows(options: dict[str, Any], output: Output) -> None:
    """Show all rows in a state, page by page."""
    from dcl_processor.insights.rows import COLUMNS, listed  # not for a run

    (processor,) = choose([options["name"]])
    ask = partial(
        listed,
        processor,
        options["state"],
        using=options["using"],
        seconds=options["timeout"],
        doubt_after=options["in_doubt"],
    )
    heads = [printing.HEAD_OF_ROWS]
    write: Callable[[Listed], str] = printing.listed
    if options["csv"]:
        heads, write = [",".join(COLUMNS)], _comma_separated
    elif options["json"]:
        heads, write = [], _json
    found = ask()
    while True:
        if found.value is None:
            why = f"{processor.name}: {found.missing.rstrip('.')}."
            raise CommandError(why, returncode=NOT_FOUND_OUT)
        output.lines([*heads, *map(write, found.value.rows)])
        if found.value.after is None:
            return
        found, heads = ask(after=found.value.after), []


def _json(row: Listed) -> str:
    return json.dumps(row.as_dict())


def _comma_separated(row: Listed) -> str:
    from dcl_processor.insights.rows import COLUMNS

    values, line = row.as_dict(), StringIO()
    texts = ["" if values[name] is None else printable(str(values[name])) for name in COLUMNS]
    # A spreadsheet would take the text of an error that begins like this for a formula.
    error = COLUMNS.index("error")
    if texts[error][:1] in ("=", "+", "-", "@"):
        texts[error] = f"'{texts[error]}"
    csv.writer(line, lineterminator="").writerow(texts)
    return line.getvalue()


# --- show


def _add_row(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")
    text = "A primary key; write a composite one with commas."
    parser.add_argument("pk", metavar="PK", help=text)
    add_question(parser)


def _show(options: dict[str, Any], output: Output) -> None:
    from dcl_processor.insights import rows as insights  # not for a run
    from dcl_processor.insights.rows import key_text

    (processor,) = choose([options["name"]])
    (pk,) = keys(processor, [options["pk"]], using=options["using"])
    found = insights.show(processor, pk, using=options["using"], seconds=options["timeout"])
    key = key_text(pk)
    if found.how == "unknown":
        why = found.missing.rstrip(".")
        raise CommandError(f"row {printable(key)}: {why}.", returncode=NOT_FOUND_OUT)
    if found.value is None:
        raise CommandError(f"row {printable(key)}: there is no row with this key.")
    output.answer(found.value.as_dict(), printing.row(found.value, key))


# --- explain and doctor


def _add_explained(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")
    add_question(parser)


def _add_examined(parser: CommandParser) -> None:
    add_names(parser)
    add_question(parser)


def _explain(options: dict[str, Any], output: Output) -> None:
    """Show the read, its plan and its index."""
    from dcl_processor.insights.explanation import explanation  # not for a run

    (processor,) = choose([options["name"]])
    try:
        found = explanation(processor, options["using"], seconds=options["timeout"])
    except Exception as error:
        sentence = f"{processor.name}: {explain(error, processor, options['using'])}"
        raise CommandError(sentence, returncode=NOT_FOUND_OUT) from error
    output.answer(found.as_dict(), printing.explanation(found))


def _examine(options: dict[str, Any], output: Output) -> None:
    """Write the findings; raise ``CommandError`` if something is wrong, or was not found out."""
    from dcl_processor.insights.doctor import Level, examine  # not for a run

    chosen, left_out = choose_and_left_out(options["names"])
    output.left_out(left_out)
    found = list(examine(chosen, using=options["using"], seconds=options["timeout"]))
    # A name in the database may be chosen by any of its roles, and must not forge a line.
    output.answer([each.as_dict() for each in found], (printable(str(each)) for each in found))
    levels = [each.level for each in found]
    if number := levels.count(Level.PROBLEM) + levels.count(Level.WARNING):
        raise CommandError(f"{number} of {len(found)} findings need attention.", returncode=FAILED)
    if left_out or Level.UNKNOWN in levels:
        raise CommandError("not everything could be found out.", returncode=NOT_FOUND_OUT)


ACTIONS = [
    Subcommand(name, text, add, handle, formats)
    for name, add, handle, formats, text in (
        ("list", add_question, _list, (), "Show each processor with its rows, age and state."),
        ("status", _add_status, _status, (), "Show what waits and what is stuck, and why."),
        ("rows", _add_rows, _rows, ("csv",), "Show all rows in a state, with their errors."),
        ("show", _add_row, _show, (), "Show why a row is handled, or not."),
        ("explain", _add_explained, _explain, (), "Show the SQL, its plan, and the index for it."),
        ("doctor", _add_examined, _examine, (), "Examine databases, tables and options."),
    )
]
