"""``processors requeue``, ``mark-done`` and ``discard``: what an operator does with stuck rows.

The rows are chosen first; those that the action would refuse are named, the number of the others is
confirmed, and only these are written to: rows that get stuck afterwards are left for another look.
Each row is locked, and compared with what it was when it was chosen.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator
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
    add_time_limit,
    choose,
    keys,
    misuse,
    typed_values,
)
from dcl_processor.management.output import Output
from dcl_processor.operator import actions
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.states import NotRecordedError
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.writes import CHANGED, Choice, Write, Written
from dcl_processor.options.worker import this_user
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described, printable, shown
from dcl_processor.report.values import Values
from dcl_processor.sql.errors import is_database_error, is_statement_timeout

logger = logging.getLogger("dcl_processor.operations")

#: The exit code after Ctrl-C, as a shell has it: 128 and the number of the signal.
INTERRUPTED = 130

#: Characters of the values, of the reason and of an error that are recorded.
LONGEST = 300

#: What each action does, and what has been done to its rows.
ACTS = {
    "requeue": (
        "Put rows back into pending, as if they had never been tried.",
        "put back into pending",
    ),
    "mark-done": (
        "Write done to claimed or given up rows whose work turned out to be done.",
        "marked as done",
    ),
    "discard": ("Give up on rows that are pending or claimed: write failed to them.", "discarded"),
}


def _add_arguments(action: str, parser: CommandParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="A processor.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    text = "Rows by their primary keys."
    chosen.add_argument("--pk", nargs="+", action="extend", metavar="PK", help=text)
    text = "The rows of a CSV file with a head: their keys, and columns with values to write "
    text += "(requeue: keys alone)."
    chosen.add_argument("--from", dest="file", metavar="FILE.csv", help=text)
    add_age(chosen, "Rows whose claim is older than this, and was never settled")
    text = "Rows that failed for good, or were discarded."
    chosen.add_argument("--given-up", action="store_true", help=text)
    text = "With --given-up: only rows whose last error is of this class; '': those without one."
    add("--error", metavar="CLASS", help=text)
    if action != "requeue":
        text = "A value to write, instead of the processor's own."
        add("--set", action="append", default=[], metavar="COLUMN=VALUE", help=text)
    if action == "discard":
        add("--reason", default="", help="A text for the row's last error.")
    text = "Also rows whose claim is young, and, unless they are discarded, in another state."
    add("--force", action="store_true", help=text)
    add_time_limit(parser, besides=", and a lock of the table")
    add("--dry-run", action="store_true", help="Show the rows, and change nothing.")
    add("--yes", action="store_true", help="Do not ask; required without a terminal.")


def _handle(action: str, options: dict[str, Any], output: Output) -> None:
    """Choose rows, show them, ask, and act."""
    (processor,) = choose([options["name"]])
    if options["error"] is not None and not options["given_up"]:
        raise misuse(
            "expected --error beside --given-up, got it beside other rows; name the rows by "
            "--given-up, or leave --error out."
        )
    # Python has no stdin if it was closed.
    can_ask = sys.stdin is not None and sys.stdin.isatty()
    if not (options["yes"] or options["dry_run"] or can_ask):
        raise misuse(
            "expected --yes, or a terminal to confirm on, got neither; look at the rows with "
            "--dry-run first."
        )
    act = _Act(action, processor, options)
    act.choose()
    if not output.as_json:
        output.lines(act.left_lines(act.choice.left))
    if act.choice.rows and not options["dry_run"]:
        _confirm(act, output)
        act.execute(output)
    output.answer(act.as_dict(), act.lines())
    if left := act.number_left():
        said = "was left as it is" if left == 1 else "were left as they are"
        raise CommandError(f"{printing.rows(left)} {said}.", returncode=FAILED)


def _confirm(act: _Act, output: Output) -> None:
    if act.options["yes"]:
        return
    code = FAILED
    rows = f"{printing.named(act.choice.rows)} of {act.processor.name}"
    try:
        if output.confirms(f"{rows} will be {act.did}. Continue? [y/N] "):
            return
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise CommandError("not confirmed; nothing was changed.", returncode=code)


@dataclass(slots=True)
class _Act:
    """One action on some rows; ``values``: to write to all, ``own``: to the rows of a file."""

    action: str
    processor: BatchProcessor[Any]
    options: dict[str, Any]
    table: Any = None
    values: Values = field(default_factory=dict)
    own: dict[Any, Values] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    done: Written = field(default_factory=Written)

    @property
    def did(self) -> str:
        return ACTS[self.action][1]

    def choose(self) -> None:
        """Choose the rows; nothing is written, so that no error leaves anything half done."""
        try:
            self._choose()
        except CommandError:
            raise
        except NotRecordedError as error:
            expected = f"expected a processor that records these rows, got {self.processor.name}"
            raise misuse(f"{expected}: {error}; or name the rows with --pk.") from error
        except ImproperlyConfigured as error:
            raise misuse(explain(error, self.processor)) from error
        except Exception as error:
            said = explain(error, self.processor, self.options["using"]).rstrip(".")
            if is_database_error(error) and is_statement_timeout(error):
                seconds = f"{self.options['timeout']:g} s"
                said = f"expected the rows within {seconds}, got no answer; raise --timeout, or "
                said += "name rows with --pk"
            said += "; nothing was changed."
            raise CommandError(said, returncode=NOT_FOUND_OUT) from error

    def _choose(self) -> None:
        from dcl_processor.insights import rows  # not for other actions

        processor, options = self.processor, self.options
        question = rows.question_of(processor, options["using"])
        self.table = question.table
        self._read_values(question.model)
        # The action's own refusals come before the first question. Each row has the same columns.
        values = next(iter(self.own.values()), self.values)
        self._write(self.table.none(), values)
        wanted = [*self.own] or None
        if options["pk"] is not None:
            wanted = keys(processor, options["pk"], using=options["using"])
        with reading(question.using, options["timeout"]):
            in_doubt, kind = options["in_doubt"], options["error"]
            found = rows.chosen(processor, question, keys=wanted, in_doubt=in_doubt, kind=kind)
            self.choice = self._write(found, values).choose()
        there = {*self.choice.rows}.union(*self.choice.left.values())
        if missing := [pk for pk in dict.fromkeys(wanted or ()) if pk not in there]:
            self.choice.left = {"no such row": missing, **self.choice.left}

    def _read_values(self, model: type[Model]) -> None:
        texts = []
        for text in self.options.get("set", []):
            name, equals, value = text.partition("=")
            if not equals:
                raise misuse(f"expected --set COLUMN=VALUE, got {text!r} without '='.")
            texts.append((name, value))
        self.values = typed_values(model, texts, "--set COLUMN=VALUE")
        if (path := self.options["file"]) is None:
            return
        columns, lines = _read(path)
        pks = keys(self.processor, [key for key, *_ in lines], using=self.options["using"])
        for pk, (_, *cells) in zip(pks, lines, strict=True):
            if pk in self.own:
                raise _unreadable(path, f"the key {pk} twice")
            given = [] if self.action == "requeue" else zip(columns, cells, strict=True)
            self.own[pk] = {**self.values, **typed_values(model, given, f"{path} to have values")}

    def _write(self, rows: QuerySet[Any, Any], values: Values) -> Write:
        """Return what is written to which of the rows; raises the action's own refusals."""
        force = self.options["force"]
        match self.action:
            case "requeue":
                return actions.to_requeue(self.processor, rows, force=force)
            case "mark-done":
                return actions.to_mark_done(self.processor, rows, values or None, force=force)
            case _:
                reason = self.options["reason"]
                return actions.to_discard(self.processor, rows, reason, values or None, force=force)

    def execute(self, output: Output) -> None:
        """Write to the chosen rows, and record it."""
        chosen, trouble = self.choice.rows, ""
        try:
            self._execute()
        except (KeyboardInterrupt, Exception) as error:
            number, total = f"{len(self.done.written):,}", printing.rows(len(chosen))
            before, code = f"{number} of {total} had been {self.did} before.", FAILED
            if isinstance(error, Exception):
                said = trouble = explain(error, self.processor, self.options["using"]).rstrip(".")
            else:
                said, trouble = "stopped", "Ctrl-C; perhaps a row more was written to"
                # It may have come in the middle of a commit.
                before, code = f"at least {before}", INTERRUPTED
            if output.as_json:
                output.document({**self.as_dict(), "error": said})
            raise CommandError(f"{said}; {before}", returncode=code) from error
        finally:
            if self.done.written or trouble:
                self._record(trouble)

    def _execute(self) -> None:
        chosen, end = self.choice.rows, time.monotonic() + self.options["timeout"]
        # Rows with values of their own are written one by one.
        has_own = any(self.own.values())
        for pks in [[pk] for pk in chosen] if has_own else [[*chosen]]:
            values = self.own.get(pks[0], self.values) if has_own else self.values
            write = self._write(self.table.filter(pk__in=pks), values)
            some = {pk: chosen[pk] for pk in pks}
            write.to_free(some, self.done, seconds=max(end - time.monotonic(), 0.0))

    def _record(self, trouble: str) -> None:
        """Record who has written what to which rows, in the log and in the ledger."""
        values = [*self.options.get("set", ())]
        if any(self.own.values()):
            some = self.done.written[: printing.SHOWN]
            values = [f"{printing.first_keys([pk])}: {_joined(self.own[pk])}" for pk in some]
        texts = {"values": ", ".join(values), "reason": self.options.get("reason", "")}
        texts = {name: shown(text, LONGEST) for name, text in {**texts, "error": trouble}.items()}
        by, keys_ = this_user(), printing.first_keys(self.done.written)
        name, number = self.processor.name, len(self.done.written)
        logger.info(
            *("%s: %s by %s: %s", name, self.action, by, printing.acted(number, keys_, **texts)),
            extra={"processor": name, "using": self.options["using"], "row_count": number},
        )
        ledger.record(self.processor, self.action, by=by, rows=number, keys=keys_, **texts)

    # --- what became of the rows

    def lines(self) -> Iterator[str]:
        """Yield the lines about the rows that were written to, and those that were left since."""
        name, chosen, written = self.processor.name, self.choice.rows, self.done.written
        if self.options["dry_run"] and chosen:
            yield f"{name}: {printing.named(chosen)} would be {self.did}"
        elif written:
            yield f"{name}: {printing.named(written)} {self.did}"
        yield from self.left_lines(self.done.left())
        if not (chosen or self.choice.left):
            yield f"{name}: no rows"

    def left_lines(self, left: dict[str, list[Any]]) -> Iterator[str]:
        """Yield a line for each reason why rows are left."""
        for why, pks in left.items():
            yield f"{self.processor.name}: {printing.named(pks)} left: {why}"

    def number_left(self) -> int:
        """Return how many rows were left, but not those that their workers have changed."""
        left = {**self.choice.left, **self.done.left()}
        return sum(len(pks) for why, pks in left.items() if why != CHANGED)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        from dcl_processor.insights.rows import key_text  # not for other actions

        left = {**self.choice.left, **self.done.left()}
        return {
            "name": self.processor.name,
            "rows": len(self.choice.rows),
            "changed": len(self.done.written),
            "dry_run": self.options["dry_run"],
            "left": [{"pk": key_text(pk), "why": why} for why, pks in left.items() for pk in pks],
        }


# --- the file of ``--from``


def _read(path: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns behind the key, and the lines."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            head, *lines = [line for line in csv.reader(file) if line] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, described(error)) from error
    if head[:1] not in (["key"], ["pk"]):
        raise _unreadable(path, f"{printable(','.join(head))!r} as its first line")
    for line in lines:
        if len(line) != len(head):
            raise _unreadable(path, f"{len(line)} columns in the line of {printable(line[0])!r}")
    if not lines:
        raise _unreadable(path, "no row")
    return head[1:], lines


def _unreadable(path: str, got: str) -> CommandError:
    expected = "expected --from to name a CSV file with the head 'key', columns to write, and each "
    return misuse(f"{expected}row once, got {got} in {path}.")


def _joined(values: Values) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


ACTIONS = [
    Subcommand(name, text, partial(_add_arguments, name), partial(_handle, name))
    for name, (text, _) in ACTS.items()
]
