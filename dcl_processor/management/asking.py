"""``processors list``, ``status``, ``rows``, ``show``, ``explain``, ``doctor``: they only read."""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from django.core.management.base import CommandError

from dcl_processor.insights import explanation
from dcl_processor.insights import status as insights
from dcl_processor.insights.doctor import Level, examine
from dcl_processor.insights.rows import COLUMNS, STATES, Listed, key_text, listed
from dcl_processor.insights.rows import show as show_row
from dcl_processor.insights.status import LINE, MOST, Status, troubles_first
from dcl_processor.management import printing
from dcl_processor.management.command_line import add_age, chosen, duration, keys, misuse, unknown
from dcl_processor.management.printing import Output
from dcl_processor.operator import registry
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

# --- list and status


def list_all(options: dict[str, Any], output: Output) -> None:
    """Show each processor with its rows, age and state."""
    with chosen([], output) as processors:
        about = {each.name: (each.__doc__ or "").strip() for each in processors}
        found = _ask(processors, options, LINE)
        _answer(output, found, printing.table(found, printing.OF_LIST, about))


def status(options: dict[str, Any], output: Output) -> None:
    """Show what waits and what is stuck, and why."""
    names, wanted = options["names"], options["fail_if"]
    with chosen(names, output) as processors:
        if wanted:
            found = _ask(processors, options, [name for _, name, _ in wanted])
            _answer(output, found, (), [*_met(found, wanted)])
        elif names or output.as_json:
            found = _ask(processors, options, insights.NUMBERS)
            _answer(output, found, chain.from_iterable(map(printing.status, found)))
        else:
            found = troubles_first(_ask(processors, options, LINE))
            _answer(output, found, printing.table(found, printing.OF_STATUS, {}))


def _ask(
    processors: Iterable[BatchProcessor[Any]], options: dict[str, Any], only: Sequence[str]
) -> list[Status]:
    # A database that does not answer is asked once: it is noted as down.
    how: dict[str, Any] = {"doubt_after": options.get("in_doubt"), "only": only, "down": {}}
    return [insights.status(each, **_where(options), **how) for each in processors]


def _where(options: dict[str, Any]) -> dict[str, Any]:
    """Return the database that is asked, and the seconds that each question may take."""
    return {"using": options["using"], "seconds": options["timeout"]}


def _answer(
    output: Output, found: Iterable[Status], lines: Iterable[str], met: Sequence[str] = ()
) -> None:
    """Show the answers; raise ``CommandError`` if conditions are met, or for what is not known."""
    output.answer([each.as_dict() for each in found], lines)
    if met:
        raise CommandError(f"{'; '.join(met)}.")
    whys = [
        f"{each.name}: {answer.missing}".rstrip(".")  # a reason may be a sentence
        for each in found
        for answer in each.answers.values()
        if answer.how == "unknown"
    ]
    if whys:
        raise unknown(f"{'; '.join(dict.fromkeys(whys))}.")


# --- the conditions of --fail-if

#: The names whose answer is a number of rows, and those whose answer is an age.
NUMBERS, AGES = STATES, ("oldest", "paused")

_CONDITION = re.compile(rf"\s*({'|'.join(NUMBERS + AGES)})\s*>\s*(\S+)\s*")


def condition(text: str) -> tuple[str, str, float]:
    """Parse a name of a status, ``>``, and a number of rows or an age; the text comes first."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a condition such as 'in_doubt>0' or 'oldest>15m' with one of "
            f"{', '.join(NUMBERS + AGES)}, got {text!r}"
        )
    name, bound = found.groups()
    least = duration(bound) if name in AGES else int(bound)
    if name in NUMBERS and least > MOST:
        raise argparse.ArgumentTypeError(
            f"expected at most {MOST} rows, up to which they are counted, got {text!r}"
        )
    return text.strip(), name, least


def add_conditions(parser: argparse.ArgumentParser) -> None:
    text = "End with 1 if this holds for a processor, such as 'in_doubt>0' or 'oldest>15m'."
    how: dict[str, Any] = {"action": "append", "default": [], "metavar": "CONDITION"}
    parser.add_argument("--fail-if", type=condition, help=text, **how)
    add_age(parser, "The age from which a claim counts as in doubt")


def _met(found: Iterable[Status], wanted: Iterable[tuple[str, str, float]]) -> Iterator[str]:
    """Yield a sentence for each condition that a processor meets.

    Raises ``CommandError`` for one that no answer can ever meet: its monitor would always be green.
    """
    for each in found:
        for text, name, least in wanted:
            answer = each.answers[name]
            if answer.how == "not recorded":
                expected = f"expected a condition with an answer that {each.name} has"
                raise misuse(f"{expected}, got {text!r}: {answer.why}; or name other processors.")
            if answer.least > least:
                yield f"{each.name}: {text}, got {printing.answer(answer)}"


# --- rows


def add_states(parser: argparse.ArgumentParser) -> None:
    state = parser.add_mutually_exclusive_group(required=True)
    add_age(state, "Rows whose claim was never settled, from this age")
    for name, text in (
        ("given_up", "Rows that failed for good."),
        ("due", "Rows to be tried now."),
        ("later", "Rows that wait for a time."),
    ):
        how: dict[str, Any] = {"action": "store_const", "const": name, "dest": "state"}
        state.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    parser.set_defaults(state="in_doubt")


def rows(options: dict[str, Any], output: Output) -> None:
    """Show all rows in a state, with their errors."""
    (processor,) = registry.get([options["name"]])
    found = _listed(processor, options)
    if options["csv"]:
        write = csv.writer(output.stdout, lineterminator="\n").writerow
        write(COLUMNS)
        for each in found:
            write(_cells(each))
    elif options["json"]:
        output.lines(json.dumps(each.as_dict()) for each in found)
    else:
        output.lines(chain([printing.HEAD_OF_ROWS], map(printing.listed, found)))


def _listed(processor: BatchProcessor[Any], options: dict[str, Any]) -> Iterator[Listed]:
    """Yield the rows, page by page."""
    after = None
    while True:
        how = {**_where(options), "doubt_after": options["in_doubt"], "after": after}
        found = listed(processor, options["state"], **how)
        if found.value is None:
            raise unknown(f"{processor.name}: {found.missing}")
        yield from found.value.rows
        if (after := found.value.after) is None:
            return


def _cells(row: Listed) -> list[str]:
    values = {name: "" if value is None else value for name, value in row.as_dict().items()}
    # A spreadsheet would take the text of an error that begins like this for a formula.
    if values["error"][:1] in ("=", "+", "-", "@"):
        values["error"] = f"'{values['error']}"
    return [printable(str(values[name])) for name in COLUMNS]


# --- show, explain and doctor


def add_key(parser: argparse.ArgumentParser) -> None:
    text = "A primary key; a composite one is JSON, such as '[3, 4]'."
    parser.add_argument("pk", metavar="PK", help=text)


def show(options: dict[str, Any], output: Output) -> None:
    """Show why a row is handled, or not."""
    (processor,) = registry.get([options["name"]])
    (pk,) = keys(processor, [options["pk"]], using=options["using"])
    found, key = show_row(processor, pk, **_where(options)), printable(key_text(pk))
    if found.value is None:
        why = f"row {key}: {found.missing or 'there is no row with this key.'}"
        raise unknown(why) if found.missing else CommandError(why)
    output.answer(found.value.as_dict(), printing.row(found.value, key))


def explain(options: dict[str, Any], output: Output) -> None:
    """Show the SQL, its plan, and the index for it."""
    (processor,) = registry.get([options["name"]])
    found = explanation.explanation(processor, **_where(options))
    output.answer(found.as_dict(), printing.explanation(found))


def doctor(options: dict[str, Any], output: Output) -> None:
    """Examine databases, tables and options."""
    with chosen(options["names"], output) as processors:
        found = list(examine(processors, **_where(options)))
        # A name in the database may be chosen by any of its roles, and must not forge a line.
        output.answer([each.as_dict() for each in found], (printable(str(each)) for each in found))
        levels = [each.level for each in found]
        if number := levels.count(Level.PROBLEM) + levels.count(Level.WARNING):
            raise CommandError(f"{number} of {len(found)} findings need attention.")
        if Level.UNKNOWN in levels:
            raise unknown("not everything could be found out.")
