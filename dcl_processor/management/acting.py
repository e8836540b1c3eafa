"""What operators do: ``processors requeue``, ``mark-done`` and ``discard``; ``pause``, ``resume``.

Rows are chosen first. Those that the action would refuse are left, and only the others are written
to, each under its lock, and only if it is what it was when it was chosen. ``history`` shows it all.
"""

from __future__ import annotations

import argparse
import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db.models import Model

from dcl_processor import ledger
from dcl_processor.insights.rows import chosen, key_text
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    add_age,
    duration,
    keys,
    misuse,
    named,
    typed_values,
)
from dcl_processor.management.printing import Output
from dcl_processor.operator import actions, registry
from dcl_processor.operator.actions import Choice, Write, Written
from dcl_processor.operator.states import question_of
from dcl_processor.operator.times import reading
from dcl_processor.options.worker import this_user
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described, shown
from dcl_processor.report.values import Values

logger = logging.getLogger("dcl_processor.operations")

#: Characters of the values and of the reason that are recorded.
LONGEST = 300

#: Seconds that a statement of the ledger may take which only reads.
READ_WITHIN = 10.0

#: Records that are shown for each processor.
RECORDS = 20


def add_rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    text = "Rows by their primary keys."
    which.add_argument("--pk", nargs="+", action="extend", metavar="PK", help=text)
    text = "The rows of a CSV file: their keys in the column 'key', and in columns of the table "
    text += "values to write (requeue: keys alone)."
    which.add_argument("--from", dest="file", metavar="FILE.csv", help=text)
    add_age(which, "Rows whose claim is older than this, and was never settled")
    text = "Rows that were given up on."
    which.add_argument("--given-up", action="store_true", help=text)
    add("--force", action="store_true", help="Also young claims, and rows in another state.")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--dry-run", action="store_true", help="Show the rows, and change nothing.")
    way.add_argument("--yes", action="store_true", help="Write to the rows.")


def add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", default="", metavar="TEXT", help="A text for people.")


def requeue(options: dict[str, Any], output: Output) -> None:
    """Put rows back into pending, as if they had never been tried."""
    _act("requeue", options, output)


def mark_done(options: dict[str, Any], output: Output) -> None:
    """Write done to claimed or given up rows whose work turned out to be done."""
    _act("mark_done", options, output)


def discard(options: dict[str, Any], output: Output) -> None:
    """Give up on rows that are pending or claimed: write failed to them."""
    _act("discard", options, output)


def _act(action: str, options: dict[str, Any], output: Output) -> None:
    """Choose rows, write to them, and show what became of them, also after an error."""
    (processor,) = registry.get([options["name"]])
    question = question_of(processor, options["using"])
    pks, values = _given(processor, question.model, options)
    found = chosen(processor, question, keys=pks, in_doubt=options["in_doubt"], kind=None)
    reason, force = options.get("reason", ""), options["force"]
    write = partial(actions.to_act, action, processor, reason=reason, force=force)
    with reading(question.using, options["timeout"]):
        # Each line of a file has the same columns, and the action's refusals depend on no value.
        choice = write(found, values=next(iter(values.values()), None)).choose()
    there = {*choice.rows}.union(*choice.left.values())
    if missing := [pk for pk in pks or () if pk not in there]:
        choice.left = {"no such row": missing, **choice.left}
    did, done = actions.DID[action], Written()
    try:
        if options["yes"]:
            _write(question, choice, values, write, done, seconds=options["timeout"])
    finally:
        if options["yes"]:
            _record(processor, options, done.written, values)
        left, rows = {**choice.left, **done.left()}, done.written
        if options["dry_run"]:
            rows, did = [*choice.rows], f"would be {did}"
        document = {
            "name": processor.name,
            "rows": len(choice.rows),
            "changed": len(done.written),
            "dry_run": options["dry_run"],
            "left": [{"pk": key_text(pk), "why": why} for why, pks in left.items() for pk in pks],
        }
        said = [f"{printing.named(pks)} left: {why}" for why, pks in left.items()]
        said.append(f"{printing.named(rows)} {did}")
        output.answer(document, (f"{processor.name}: {each}" for each in said))
    if number := sum(map(len, left.values())):
        raise CommandError(f"{printing.rows(number)} left.")


def _given(
    processor: BatchProcessor[Any], model: type[Model], options: dict[str, Any]
) -> tuple[list[Any] | None, dict[Any, Values]]:
    """Return the keys that were given, if any were, and what a file has to be written to each."""
    texts, path, using = options["pk"], options["file"], options["using"]
    if path is None:
        return texts and keys(processor, texts, using=using), {}
    lines = _lines(path)
    pks = keys(processor, [line.pop("key") for line in lines], using=using)
    if len({*pks}) < len(pks):
        raise misuse(f"expected --from to name a file that has each row once, got {path}.")
    if options["action"] == "requeue" or not any(lines):
        return pks, {}
    of = "--from to name a file with values of the table's columns"
    return pks, {
        pk: typed_values(model, line.items(), of) for pk, line in zip(pks, lines, strict=True)
    }


def _lines(path: str) -> list[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines: list[dict[Any, Any]] = [*csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        raise misuse(f"expected --from to name a CSV file, got: {described(error)}") from error
    for line in lines:
        if "key" not in line or None in line or None in line.values():
            expected = "expected a column 'key', and in each line as many columns as in the head"
            raise misuse(f"{expected}, got {line} in {path}.")
    return lines


def _write(
    question: Question[Any],
    choice: Choice,
    values: Mapping[Any, Values],
    write: Callable[..., Write],
    done: Written,
    *,
    seconds: float,
) -> None:
    """Write to the chosen rows; to those with values of their own one by one."""
    end, pks = time.monotonic() + seconds, [*choice.rows]
    for some in [[pk] for pk in pks] if values else [pks]:
        own = values[some[0]] if values else None
        seen = {pk: choice.rows[pk] for pk in some}
        left = max(end - time.monotonic(), 0.0)
        write(question.table.filter(pk__in=some), values=own).to_free(seen, done, seconds=left)


def _record(
    processor: BatchProcessor[Any],
    options: dict[str, Any],
    written: Sequence[Any],
    values: Mapping[Any, Values],
) -> None:
    """Record who has written what to which rows, in the log and in the ledger."""
    action, by, number = options["action"], this_user(), len(written)
    own = [
        f"{key_text(pk)}: {', '.join(f'{name}={value}' for name, value in values[pk].items())}"
        for pk in written[: printing.SHOWN]
        if values
    ]
    said, reason = shown("; ".join(own), LONGEST), shown(options.get("reason", ""), LONGEST)
    text = printing.together(printing.named(written), said, reason)
    known = {"processor": processor.name, "using": options["using"], "row_count": number}
    logger.info("%s: %s by %s: %s", processor.name, action, by, text, extra=known)
    texts = {"keys": printing.first_keys(written), "values": said, "reason": reason}
    ledger.record(processor, action, by=by, rows=number, **texts)


# --- the ledger


def add_end(parser: argparse.ArgumentParser) -> None:
    text = "The end of the pause, from now on, such as 2h (default: resume)."
    parser.add_argument("--until", type=duration, metavar="TIME", help=text)


def pause(options: dict[str, Any], output: Output) -> None:
    """Let no worker start a row, on all machines, until resume."""
    pause_one = partial(ledger.pause, reason=options["reason"], until=options["until"])
    _order(pause_one, options, output)


def resume(options: dict[str, Any], output: Output) -> None:
    """End a pause."""
    _order(ledger.resume, options, output)


def _order(order: Callable[[str], bool], options: dict[str, Any], output: Output) -> None:
    _expect_ledger()
    names = [each.name for each in named(options["names"])]
    for name in [ledger.ALL] if options["all"] else names:
        order(name)
    with reading(ledger.alias(), READ_WITHIN):
        states = ledger.states(names)
    output.answer([each.as_dict() for each in states], map(printing.standing, states))


def history(options: dict[str, Any], output: Output) -> None:
    """Show what runs and operators did last."""
    _expect_ledger()
    names = options["names"]
    with reading(ledger.alias(), READ_WITHIN):
        found = [
            record
            for each in (named(names) if names else [None])
            for record in ledger.history(each, limit=RECORDS)
        ]
    output.answer([each.as_dict() for each in found], map(printing.record, found))


def _expect_ledger() -> None:
    if not ledger.is_on():
        raise misuse(
            f"expected {ledger.APP!r} in INSTALLED_APPS, and on, where pauses and records are "
            "kept, got none; add it, and run manage.py migrate."
        )
