"""``processors requeue``, ``mark-done`` and ``discard``: what an operator does with stuck rows.

The rows are chosen first; those that the action would refuse are left, and only the others are
written to, each under its lock, and only if it is what it was when it was chosen.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db.models import Model, QuerySet

from dcl_processor import ledger
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    FAILED,
    NOT_FOUND_OUT,
    Subcommand,
    add_age,
    add_question,
    choose,
    keys,
    misuse,
    typed_values,
)
from dcl_processor.management.output import Output
from dcl_processor.operator import actions
from dcl_processor.operator.actions import Choice, Write, Written
from dcl_processor.operator.diagnosis import explain, one_line
from dcl_processor.operator.states import NotRecordedError
from dcl_processor.operator.times import reading
from dcl_processor.options.worker import this_user
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described, printable, shown
from dcl_processor.report.values import Values

logger = logging.getLogger("dcl_processor.operations")

#: Characters of the values, of the reason and of an error that are recorded.
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Action:
    """One action; ``did``: what has been done to its rows.

    ``write`` returns what is written to which of the rows, and raises the action's own refusals. It
    takes the processor, the rows, values instead of the processor's own, and the options.
    """

    name: str
    help: str
    did: str
    add_arguments: Callable[[CommandParser], None]
    write: Callable[[Any, QuerySet[Any, Any], Values | None, dict[str, Any]], Write]


def _add_arguments(parser: CommandParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="A processor.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    text = "Rows by their primary keys."
    chosen.add_argument("--pk", nargs="+", action="extend", metavar="PK", help=text)
    text = "The rows of a CSV file with a head: their keys, and columns with values to write "
    text += "(requeue: keys alone)."
    chosen.add_argument("--from", dest="file", metavar="FILE.csv", help=text)
    add_age(chosen, "Rows whose claim is older than this, and was never settled")
    text = "Rows that were given up on."
    chosen.add_argument("--given-up", action="store_true", help=text)
    add("--force", action="store_true", help="Also young claims, and rows in another state.")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--dry-run", action="store_true", help="Show the rows, and change nothing.")
    way.add_argument("--yes", action="store_true", help="Write to the rows.")
    add_question(parser)


def _add_mark_done(parser: CommandParser) -> None:
    _add_arguments(parser)
    text = "A value to write instead of the processor's own; may be repeated."
    how: dict[str, Any] = {"action": "append", "default": [], "metavar": "COLUMN=VALUE"}
    parser.add_argument("--set", type=assignment, help=text, **how)


def _add_discard(parser: CommandParser) -> None:
    _add_mark_done(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="Goes to the last error.")


def assignment(text: str) -> tuple[str, str]:
    """Parse ``COLUMN=VALUE``."""
    column, value = text.split("=", 1)
    return column, value


def _handle(action: Action, options: dict[str, Any], output: Output) -> None:
    """Choose rows, act, and show what became of them."""
    (processor,) = choose([options["name"]])
    act = _Act(action, processor, options)
    act.choose()
    if act.choice.rows and options["yes"]:
        act.execute()
    output.answer(act.as_dict(), act.lines())
    if act.trouble:
        number, total = len(act.done.written), printing.rows(len(act.choice.rows))
        raise CommandError(f"{act.trouble}; {number:,} of {total} had been {action.did} before.")
    if left := sum(map(len, act.left.values())):
        raise CommandError(f"{printing.rows(left)} left.", returncode=FAILED)


@dataclass(slots=True)
class _Act:
    """One action on some rows; ``values``: to write to all, ``own``: to the rows of a file.

    ``trouble``: what has ended it, if anything did.
    """

    action: Action
    processor: BatchProcessor[Any]
    options: dict[str, Any]
    table: Any = None
    values: Values = field(default_factory=dict)
    own: dict[Any, Values] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    done: Written = field(default_factory=Written)
    trouble: str = ""

    def choose(self) -> None:
        """Choose the rows; nothing is written, so that no error leaves anything half done."""
        try:
            self._choose()
        except CommandError:
            raise
        except (NotRecordedError, ImproperlyConfigured) as error:
            name = self.processor.name
            said = one_line(error).removeprefix(f"{name}: ")
            raise misuse(f"{name}: {said}") from error
        except Exception as error:
            said = explain(error, self.processor, self.options["using"]).rstrip(".")
            raise CommandError(f"{said}; nothing was changed.", returncode=NOT_FOUND_OUT) from error

    def _choose(self) -> None:
        from dcl_processor.insights import rows  # not for other actions

        processor, options = self.processor, self.options
        question = rows.question_of(processor, options["using"])
        self.table = question.table
        self._read_values(question.model)
        # The action's own refusals come before the first question. Each row has the same columns.
        values = next(iter(self.own.values()), self.values)
        self._write(self.table.none(), values)
        wanted = None if options["file"] is None else [*self.own]
        if options["pk"] is not None:
            wanted = keys(processor, options["pk"], using=options["using"])
        with reading(question.using, options["timeout"]):
            in_doubt = options["in_doubt"]
            found = rows.chosen(processor, question, keys=wanted, in_doubt=in_doubt, kind=None)
            self.choice = self._write(found, values).choose()
        there = {*self.choice.rows}.union(*self.choice.left.values())
        if missing := [pk for pk in dict.fromkeys(wanted or ()) if pk not in there]:
            self.choice.left = {"no such row": missing, **self.choice.left}

    def _read_values(self, model: type[Model]) -> None:
        typed = self.options.get("set", [])
        self.values = typed_values(model, typed, "--set COLUMN=VALUE")
        if (path := self.options["file"]) is None:
            return
        columns, lines = _read(path)
        pks = keys(self.processor, [key for key, *_ in lines], using=self.options["using"])
        if len({*pks}) < len(pks):
            raise _unreadable(path, "a key twice")
        for pk, (_, *cells) in zip(pks, lines, strict=True):
            given = zip(columns, cells, strict=True) if "set" in self.options else ()
            self.own[pk] = {**self.values, **typed_values(model, given, f"{path} to have values")}

    def _write(self, rows: QuerySet[Any, Any], values: Values) -> Write:
        return self.action.write(self.processor, rows, values or None, self.options)

    def execute(self) -> None:
        """Write to the chosen rows, and record it, also if it was ended in the middle."""
        try:
            self._execute()
        except Exception as error:  # noqa: BLE001  # the answer has what was written before
            self.trouble = explain(error, self.processor, self.options["using"]).rstrip(".")
        finally:
            self._record()

    def _execute(self) -> None:
        chosen, end = self.choice.rows, time.monotonic() + self.options["timeout"]
        # Rows with values of their own are written one by one.
        has_own = any(self.own.values())
        for pks in [[pk] for pk in chosen] if has_own else [[*chosen]]:
            write = self._write(self.table.filter(pk__in=pks), self.own.get(pks[0], self.values))
            some = {pk: chosen[pk] for pk in pks}
            write.to_free(some, self.done, seconds=max(end - time.monotonic(), 0.0))

    def _record(self) -> None:
        """Record who has written what to which rows, in the log and in the ledger."""
        name, number, by = self.processor.name, len(self.done.written), this_user()
        values = [f"{column}={value}" for column, value in self.options.get("set", ())]
        some = [pk for pk in self.done.written[: printing.SHOWN] if self.own.get(pk)]
        values += [f"{printing.first_keys([pk])}: {_joined(self.own[pk])}" for pk in some]
        texts = {"values": ", ".join(values), "reason": self.options.get("reason", "")}
        texts["error"] = self.trouble
        texts = {name: shown(text, LONGEST) for name, text in texts.items()}
        keys_ = printing.first_keys(self.done.written)
        logger.info(
            *("%s: %s by %s%s", name, self.action.name, by),
            printing.acted(number, keys_, *texts.values()),
            extra={"processor": name, "using": self.options["using"], "row_count": number},
        )
        ledger.record(self.processor, self.action.name, by=by, rows=number, keys=keys_, **texts)

    # --- what became of the rows

    @property
    def left(self) -> dict[str, list[Any]]:
        """The keys of the rows that were left, by reason."""
        return {**self.choice.left, **self.done.left()}

    def lines(self) -> Iterator[str]:
        """Yield a line about the rows that were written to, and one for each reason."""
        name, rows, did = self.processor.name, self.done.written, self.action.did
        if self.options["dry_run"]:
            rows, did = [*self.choice.rows], f"would be {did}"
        for why, pks in self.left.items():
            yield f"{name}: {printing.named(pks)} left: {why}"
        yield f"{name}: {printing.named(rows)} {did}"

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        from dcl_processor.insights.rows import key_text  # not for other actions

        return {
            "name": self.processor.name,
            "rows": len(self.choice.rows),
            "changed": len(self.done.written),
            "dry_run": self.options["dry_run"],
            "left": [
                {"pk": key_text(pk), "why": why} for why, pks in self.left.items() for pk in pks
            ],
        }


# --- the file of ``--from``


def _read(path: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns behind the key, and the lines."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            head, lines = next(reader, []), [*reader]
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, described(error)) from error
    if head[:1] != ["key"]:
        raise _unreadable(path, f"{printable(','.join(head))!r} as its first line")
    for line in lines:
        if len(line) != len(head):
            text = printable(",".join(line))
            raise _unreadable(path, f"{len(line)} columns in the line {text!r}")
    return head[1:], lines


def _unreadable(path: str, got: str) -> CommandError:
    expected = "expected --from to name a CSV file with the head 'key', columns to write, and each "
    return misuse(f"{expected}row once, got {got} in {path}.")


def _joined(values: Values) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


# --- the actions


def _requeue(processor: Any, rows: Any, _: Values | None, options: dict[str, Any]) -> Write:
    return actions.to_requeue(processor, rows, force=options["force"])


def _mark_done(processor: Any, rows: Any, values: Values | None, options: dict[str, Any]) -> Write:
    return actions.to_mark_done(processor, rows, values, force=options["force"])


def _discard(processor: Any, rows: Any, values: Values | None, options: dict[str, Any]) -> Write:
    return actions.to_discard(processor, rows, options["reason"], values, force=options["force"])


_ACTIONS = [
    Action(
        "requeue",
        "Put rows back into pending, as if they had never been tried.",
        "put back into pending",
        _add_arguments,
        _requeue,
    ),
    Action(
        "mark-done",
        "Write done to claimed or given up rows whose work turned out to be done.",
        "marked as done",
        _add_mark_done,
        _mark_done,
    ),
    Action(
        "discard",
        "Give up on rows that are pending or claimed: write failed to them.",
        "discarded",
        _add_discard,
        _discard,
    ),
]
ACTIONS = [
    Subcommand(each.name, each.help, each.add_arguments, partial(_handle, each))
    for each in _ACTIONS
]
