"""``processors list``, ``status``, ``rows``, ``show``, ``explain``, ``doctor``: they only read."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.management import conditions, printing
from dcl_processor.management.command_line import (
    FAILED,
    NOT_FOUND_OUT,
    USAGE_ERROR,
    Subcommand,
    add_age,
    add_names,
    add_time_limit,
    choose,
    keys,
    misuse,
    named_or_all,
)
from dcl_processor.management.output import Output
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.insights.rows import Listed
    from dcl_processor.insights.status import Status

#: Seconds that each question of ``list`` may take.
LIST_TIMEOUT = 1.0

#: The states of rows that ``rows`` shows, besides those in doubt.
SHOWN = {"given_up": "failed for good", "due": "to be tried now", "later": "waiting for a time"}


# --- list and status


def _add_list(parser: CommandParser) -> None:
    add_time_limit(parser, default=LIST_TIMEOUT)


def _add_status(parser: CommandParser) -> None:
    add_names(parser)
    text = "End with 1 if this holds for a processor, such as 'in_doubt>0' or 'oldest>15m'; ask "
    text += "only for what the conditions need."
    how: dict[str, Any] = {"action": "append", "default": [], "metavar": "CONDITION"}
    parser.add_argument("--fail-if", type=conditions.parse, help=text, **how)
    add_age(parser, "The age from which a claim counts as in doubt")
    add_time_limit(parser)


def _list(options: dict[str, Any], output: Output) -> None:
    """Show each processor in a line, in the order of the apps."""
    chosen, left_out = named_or_all([])
    found = _ask(chosen, options, in_lines=True)
    about = printing.first_lines(chosen)
    _answer(output, found, printing.table(found, printing.OF_LIST, about), left_out)


def _status(options: dict[str, Any], output: Output) -> None:
    """Show the named processors, or a line for each one; or check the conditions."""
    from dcl_processor.insights.status import troubles_first  # not for a run

    wanted: list[conditions.Condition] = options["fail_if"]
    chosen, left_out = named_or_all(options["names"])
    in_lines = not (options["names"] or output.as_json)
    found = _ask(chosen, options, wanted, in_lines=in_lines)
    met = [*conditions.met(found, wanted)]
    lines: Iterable[str] = ()
    if not wanted and options["names"]:
        lines = (line for each in found for line in printing.status(each))
    elif not wanted:
        found = troubles_first(found)
        lines = printing.table(found, printing.OF_STATUS)
    _answer(output, found, lines, left_out, met)


def _ask(
    chosen: Iterable[BatchProcessor[Any]],
    options: dict[str, Any],
    wanted: Iterable[conditions.Condition] = (),
    *,
    in_lines: bool,
) -> list[Status]:
    from dcl_processor.insights import status as insights  # not for a run
    from dcl_processor.operator.backlog import MOST

    only = [each.name for each in wanted]
    numbers = (int(each.bound) for each in wanted if each.name in conditions.NUMBERS)
    ask = partial(
        insights.status,
        using=options["using"],
        seconds=options["timeout"],
        doubt_after=options.get("in_doubt"),
        # Counted far enough to compare.
        most=max(MOST, *numbers, 0),
        only=only or (insights.LINE if in_lines else None),
        # A database that does not answer is asked once.
        down={},
    )
    return [ask(processor) for processor in chosen]


def _answer(
    output: Output,
    found: list[Status],
    lines: Iterable[str],
    left_out: Iterable[registry.Broken],
    met: Iterable[str] = (),
) -> None:
    """Write the answers; raise for conditions that are met, and for what was not found out."""
    output.answer([each.as_dict() for each in found], lines)
    output.left_out([*left_out])
    names: dict[tuple[str, str], list[str]] = {}
    for each in found:
        for name, answer in each.answers.items():
            if answer.how == "unknown":
                names.setdefault((each.name, answer.why), []).append(name)
    said = [
        *met,
        *(
            f"{of}: {', '.join(which)} could not be found out: {why}"
            for (of, why), which in names.items()
        ),
        *(f"{each.app}: its processors cannot be imported" for each in left_out),
    ]
    if said:
        # A reason may be a sentence with an end of its own.
        text = "; ".join(dict.fromkeys(each.rstrip(".") for each in said))
        raise CommandError(f"{text}.", returncode=FAILED if met else NOT_FOUND_OUT)


# --- rows


def _add_rows(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")
    state = parser.add_mutually_exclusive_group(required=True)
    add_age(state, "Rows whose claim was never settled, from this age")
    for name, what in SHOWN.items():
        how: dict[str, Any] = {"action": "store_const", "dest": "state", "const": name}
        state.add_argument(f"--{name.replace('_', '-')}", help=f"Rows {what}.", **how)
    text = "Only rows whose last error is of this class."
    parser.add_argument("--error", metavar="CLASS", help=text)
    parser.add_argument("--csv", action="store_true", help="Print CSV, with a head.")
    add_time_limit(parser)


def _rows(options: dict[str, Any], output: Output) -> None:
    """Show all rows in a state, page by page."""
    from dcl_processor.insights.rows import COLUMNS, listed  # not for a run

    (processor,) = choose([options["name"]])
    if options["csv"] and output.as_json:
        raise misuse("expected --csv or --json, got both.")
    ask = partial(
        listed,
        processor,
        options["state"] or "in_doubt",
        using=options["using"],
        seconds=options["timeout"],
        doubt_after=options["in_doubt"],
        kind=options["error"],
    )
    write = _row_line(options)
    after, is_first = None, True
    while is_first or after is not None:
        found = ask(after=after)
        if found.value is None:
            code = NOT_FOUND_OUT if found.how == "unknown" else USAGE_ERROR
            more = "" if is_first else "; these are not all rows"
            raise CommandError(
                f"{processor.name}: {found.missing.rstrip('.')}{more}.", returncode=code
            )
        if is_first and options["csv"]:
            output.lines([",".join(COLUMNS)])
        elif is_first and not output.as_json:
            output.lines(
                [printing.HEAD_OF_ROWS if found.value.rows else f"{processor.name}: no rows"]
            )
        output.lines(map(write, found.value.rows))
        after, is_first = found.value.after, False


def _row_line(options: dict[str, Any]) -> Any:
    if options["json"]:
        return lambda row: json.dumps(row.as_dict())
    return _comma_separated if options["csv"] else printing.listed


def _comma_separated(row: Listed) -> str:
    from dcl_processor.insights.rows import COLUMNS

    values, line = row.as_dict(), StringIO()
    # A spreadsheet would take the text of an error that begins like this for a formula.
    texts = [
        f"'{text}" if name == "error" and text[:1] in ("=", "+", "-", "@") else text
        for name in COLUMNS
        for text in ["" if values[name] is None else printable(str(values[name]))]
    ]
    csv.writer(line, lineterminator="").writerow(texts)
    return line.getvalue()


# --- show


def _add_row(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")
    text = "A primary key; write a composite one with commas."
    parser.add_argument("pk", metavar="PK", help=text)
    add_time_limit(parser)


def _show(options: dict[str, Any], output: Output) -> None:
    from dcl_processor.insights import row as insights  # not for a run
    from dcl_processor.insights.rows import key_text

    (processor,) = choose([options["name"]])
    (pk,) = keys(processor, [options["pk"]], using=options["using"])
    found = insights.show(processor, pk, using=options["using"], seconds=options["timeout"])
    row, named = found.value, f"row {printable(options['pk'])}"
    if row is None:
        output.answer({"name": processor.name, "pk": options["pk"], **found.as_dict()}, ())
        why = found.missing or "there is no row with this key"
        code = NOT_FOUND_OUT if found.missing else FAILED
        raise CommandError(f"{named}: {why.rstrip('.')}.", returncode=code)
    output.answer(row.as_dict(), printing.row(row, key_text(row.pk)))
    if row.locked.how == "unknown":
        why = f"who has locked it could not be found out: {row.locked.why}"
        raise CommandError(f"{named}: {why}.", returncode=NOT_FOUND_OUT)


# --- explain and doctor


def _add_named(parser: CommandParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="Processors to explain.")
    add_time_limit(parser)


def _add_examined(parser: CommandParser) -> None:
    add_names(parser)
    add_time_limit(parser)


def _explain(options: dict[str, Any], output: Output) -> None:
    """Explain each processor; raise ``CommandError`` if one could not be explained."""
    from dcl_processor.insights.explanation import explanation  # not for a run

    failed = []
    for processor in choose(options["names"]):
        try:
            found = explanation(processor, options["using"], seconds=options["timeout"])
        except Exception as error:  # noqa: BLE001  # the others can be explained
            output.broke(processor.name, Trouble.of(error, processor, options["using"]))
            failed.append(processor.name)
        else:
            output.answer(found.as_dict(), printing.explanation(found))
    if failed:
        raise CommandError(
            f"{' and '.join(failed)} could not be explained.", returncode=NOT_FOUND_OUT
        )


def _examine(options: dict[str, Any], output: Output) -> None:
    """Write the findings; raise ``CommandError`` if something is wrong, or was not found out."""
    from dcl_processor.insights.doctor import Level, examine  # not for a run

    chosen, left_out = named_or_all(options["names"])
    output.left_out(left_out)
    found = list(examine(chosen, using=options["using"], seconds=options["timeout"]))
    # A name in the database may be chosen by any of its roles, and must not forge a line.
    output.answer([each.as_dict() for each in found], (printable(str(each)) for each in found))
    levels = [each.level for each in found]
    if number := sum(level in (Level.PROBLEM, Level.WARNING) for level in levels):
        raise CommandError(f"{number} of {len(found)} findings need attention.", returncode=FAILED)
    if left_out or Level.UNKNOWN in levels:
        raise CommandError("not everything could be found out.", returncode=NOT_FOUND_OUT)


ACTIONS = [
    Subcommand(name, text, add, handle, lost=NOT_FOUND_OUT)
    for name, add, handle, text in (
        ("list", _add_list, _list, "Show each processor with its pending rows, age and state."),
        ("status", _add_status, _status, "Show what waits and what is stuck, since when and why."),
        ("rows", _add_rows, _rows, "Show all rows in a state: key, since when, attempts, error."),
        ("show", _add_row, _show, "Show why a row is handled, or not."),
        ("explain", _add_named, _explain, "Show the SQL, its plan, and the index for it."),
        ("doctor", _add_examined, _examine, "Examine databases, tables and options."),
    )
]
