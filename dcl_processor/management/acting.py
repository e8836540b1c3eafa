"""``processors requeue``, ``mark-done`` and ``discard``: what an operator does with stuck rows.

The rows are chosen first, with their marks; those that the action would refuse are named, the
number of the others is confirmed, and only these are written to: rows that get stuck afterwards are
left for another look. Each row is locked, and compared with what it was when it was chosen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from dcl_processor import log_fields, operator_actions, oversight
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.writes import CHANGED, Choice, Write, Written
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable, shown
from dcl_processor.report.values import Values
from dcl_processor.sql.errors import is_database_error, is_statement_timeout
from dcl_processor.worker import this_user

from . import wording
from .command_line import NOT_FOUND_OUT, USAGE_ERROR, add_time_limit, choose, keys, typed_values
from .conditions import duration
from .output import Output

#: Keys that are shown.
SHOWN = 10

#: The exit code if rows were left, or not all was done.
LEFT = 1

#: The exit code after Ctrl-C, as a shell has it: 128 and the number of the signal.
INTERRUPTED = 130

MISSING = "no such row"


@dataclass(frozen=True, slots=True)
class Action:
    """One action; ``did``: what has been done to its rows."""

    HELP: str
    name: str
    did: str
    takes_values: bool = False
    takes_reason: bool = False

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action's own options."""
        parser.add_argument("name", metavar="NAME", help="A processor.")
        chosen = parser.add_mutually_exclusive_group(required=True)
        chosen.add_argument(
            "--pk",
            nargs="+",
            action="extend",
            metavar="PK",
            help="Rows by their primary keys, but not leased ones.",
        )
        chosen.add_argument(
            "--in-doubt",
            type=duration,
            metavar="OLDER",
            help="Rows whose claim is older than this, such as 15m, and than 60 s for each row of "
            "batch_size, and was never settled.",
        )
        chosen.add_argument(
            "--given-up", action="store_true", help="Rows that failed for good, or were discarded."
        )
        parser.add_argument(
            "--error",
            metavar="CLASS",
            help="With --given-up: only the rows whose last error is of this class; an empty "
            "text: those without an error.",
        )
        self._add_values(parser)
        parser.add_argument(
            "--force",
            action="store_true",
            help="Also rows whose claim is young, and, unless they are discarded, rows in another "
            "state.",
        )
        add_time_limit(parser, besides=", and a lock of the table")
        parser.add_argument(
            "--dry-run", action="store_true", help="Show the rows, and change nothing."
        )
        parser.add_argument(
            "--yes", action="store_true", help="Do not ask; required without a terminal."
        )

    def _add_values(self, parser: CommandParser) -> None:
        if self.takes_values:
            parser.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="COLUMN=VALUE",
                help="A value to write, instead of the processor's own.",
            )
        if self.takes_reason:
            parser.add_argument("--reason", default="", help="A text for the row's last error.")

    def handle(self, output: Output, options: dict[str, Any]) -> None:
        """Choose rows, show them, ask, and act."""
        (processor,) = choose([options["name"]])
        if options["error"] is not None and not options["given_up"]:
            raise CommandError(
                "expected --error beside --given-up, got it beside other rows; name the rows by "
                "--given-up, or leave --error out.",
                returncode=USAGE_ERROR,
            )
        # Python has no stdin if it was closed.
        can_ask = sys.stdin is not None and sys.stdin.isatty()
        if not (options["yes"] or options["dry_run"] or can_ask):
            raise CommandError(
                "expected --yes, or a terminal to confirm on, got neither; look at the rows with "
                "--dry-run first.",
                returncode=USAGE_ERROR,
            )
        write, choice = self._choose(processor, options)
        result = Result(processor.name, self.did, choice, Written(), is_dry=options["dry_run"])
        if not output.as_json:
            output.lines(result.left_lines(choice.left))
        if choice.rows and not options["dry_run"]:
            self._act(processor, write, output, options, result)
        output.answer(result.as_dict(), result.lines())
        if left := result.number_left():
            said = "was left as it is" if left == 1 else "were left as they are"
            raise CommandError(f"{wording.rows(left)} {said}.", returncode=LEFT)

    def write(
        self,
        processor: BatchProcessor[Any],
        rows: QuerySet[Any],
        *,
        values: Values | None = None,
        reason: str = "",
        force: bool = False,
    ) -> Write:
        """Return what is written to which of the rows; raises the action's own refusals."""
        match self.name:
            case "requeue":
                return operator_actions.to_requeue(processor, rows, force=force)
            case "mark-done":
                write = operator_actions.to_mark_done(processor, rows, values, force=force)
            case _:
                write = operator_actions.to_discard(processor, rows, reason, values)
        if not force:
            write.needs = [*operator_actions.may_be_at_work(processor), *write.needs]
        return write

    def _act(
        self,
        processor: BatchProcessor[Any],
        write: Write,
        output: Output,
        options: dict[str, Any],
        result: Result,
    ) -> None:
        chosen, written = result.choice.rows, result.done.written
        if not options["yes"]:
            rows = f"{named(chosen)} of {processor.name}"
            _confirm(output, f"{rows} will be {self.did}. Continue? [y/N] ")
        trouble = ""
        try:
            write.to_free(chosen, result.done, seconds=options["timeout"])
        except (KeyboardInterrupt, Exception) as error:
            number = f"{len(written):,} of {wording.rows(len(chosen))} had been {self.did} before."
            code = LEFT
            if isinstance(error, Exception):
                said = trouble = explain(error, processor, options["using"]).rstrip(".")
            else:
                said, trouble = "stopped", "Ctrl-C; perhaps a row more was written to"
                # It may have come in the middle of a commit.
                number, code = f"at least {number}", INTERRUPTED
            if output.as_json:
                output.document({**result.as_dict(), "error": said})
            raise CommandError(f"{said}; {number}", returncode=code) from error
        finally:
            if written or trouble:
                leave_trace(processor.name, self.name, options, written, error=trouble)

    def _choose(
        self, processor: BatchProcessor[Any], options: dict[str, Any]
    ) -> tuple[Write, Choice]:
        """Choose the rows; nothing is written, so that no error leaves anything half done."""
        from dcl_processor.insights import rows  # not for other actions

        try:
            question = rows.question_of(processor, options["using"])
            values = typed_values(question.model, options.get("set", [])) or None
            given: dict[str, Any] = {"values": values, "force": options["force"]}
            given["reason"] = options.get("reason", "")
            # The action's own refusals come before the first question.
            self.write(processor, question.table.none(), **given)
            wanted = None
            if options["pk"] is not None:
                wanted = keys(processor, options["pk"], using=options["using"])
            with reading(question.using, options["timeout"]):
                found = rows.chosen(
                    processor,
                    question,
                    keys=wanted,
                    in_doubt=options["in_doubt"],
                    kind=options["error"],
                )
                write = self.write(processor, found, **given)
                choice = write.choose()
        except CommandError:
            raise
        except rows.NotRecordedError as error:
            raise CommandError(
                f"expected a processor that records these rows, got {processor.name}: {error}; or "
                "name the rows with --pk.",
                returncode=USAGE_ERROR,
            ) from error
        except Exception as error:
            raise _not_chosen(error, processor, options) from error
        there = {*choice.rows}.union(*choice.left.values())
        if missing := [pk for pk in dict.fromkeys(wanted or ()) if pk not in there]:
            choice.left = {MISSING: missing, **choice.left}
        return write, choice


def _confirm(output: Output, question: str) -> None:
    code = LEFT
    try:
        if output.confirms(question):
            return
    except KeyboardInterrupt:
        code = INTERRUPTED
        output.ends_line()
    raise CommandError("not confirmed; nothing was changed.", returncode=code)


def _not_chosen(
    error: Exception, processor: BatchProcessor[Any], options: dict[str, Any]
) -> CommandError:
    if isinstance(error, ImproperlyConfigured):
        return CommandError(explain(error, processor), returncode=USAGE_ERROR)
    if is_database_error(error) and is_statement_timeout(error):
        said = (
            f"expected the rows within {options['timeout']:g} s, got no answer; raise --timeout, "
            "or name rows with --pk"
        )
    else:
        said = explain(error, processor, options["using"])
    return CommandError(f"{said.rstrip('.')}; nothing was changed.", returncode=NOT_FOUND_OUT)


@dataclass(frozen=True, slots=True)
class Result:
    """What is written about an action."""

    name: str
    did: str
    choice: Choice
    done: Written
    is_dry: bool

    def lines(self) -> Iterator[str]:
        """Yield the lines about the rows that were written to, and those that were left since."""
        if self.is_dry:
            if self.choice.rows:
                yield f"{self.name}: {named(self.choice.rows)} would be {self.did}"
        elif self.done.written:
            yield f"{self.name}: {named(self.done.written)} {self.did}"
        yield from self.left_lines(self.done.left())
        if not (self.choice.rows or self.choice.left):
            yield f"{self.name}: no rows"

    def left_lines(self, left: dict[str, list[Any]]) -> Iterator[str]:
        for why, pks in left.items():
            yield f"{self.name}: {named(pks)} left: {why}"

    def number_left(self) -> int:
        """Return how many rows were left, but not those that their workers have changed."""
        left = {**self.choice.left, **self.done.left()}
        return sum(len(pks) for why, pks in left.items() if why != CHANGED)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        left = {**self.choice.left, **self.done.left()}
        return {
            "name": self.name,
            "rows": len(self.choice.rows),
            "changed": len(self.done.written),
            "dry_run": self.is_dry,
            "left": [{"pk": _key(pk), "why": why} for why, pks in left.items() for pk in pks],
        }


def named(pks: Collection[Any]) -> str:
    """Return the number of rows, and the first of their keys."""
    return wording.rows(len(pks), first_keys(pks))


def first_keys(pks: Collection[Any]) -> str:
    """Return the first keys of rows, as ``--pk`` reads them."""
    some = ", ".join(printable(_key(pk)) for pk in islice(pks, SHOWN))
    return f"{some}{', …' if len(pks) > SHOWN else ''}"


def _key(pk: Any) -> str:
    """Return a primary key as ``--pk`` reads it."""
    from dcl_processor.insights.rows import key_text  # not for other actions

    return key_text(pk)


REQUEUE = Action(
    HELP="Put rows back into pending, as if they had never been tried.",
    name="requeue",
    did="put back into pending",
)
MARK_DONE = Action(
    HELP="Write done to claimed or given up rows whose work turned out to be done.",
    name="mark-done",
    did="marked as done",
    takes_values=True,
)
DISCARD = Action(
    HELP="Give up on rows that are pending or claimed: write failed to them.",
    name="discard",
    did="discarded",
    takes_values=True,
    takes_reason=True,
)


# --- the trace of an action on rows: a record of the log, and one of the ledger if there is one


#: Characters of the values, of the reason and of an error.
LONGEST = 300

logger = logging.getLogger("dcl_processor.operations")


def leave_trace(
    name: str, action: str, options: dict[str, Any], written: Collection[Any], *, error: str
) -> None:
    """Record who has written what to which rows; ``error``: what ended it, if anything did.

    Secrets in texts are masked. An error is logged and not raised, because the rows are written to
    already.
    """
    by, rows, keys = this_user(), len(written), first_keys(written)
    texts = {
        "values": shown(", ".join(options.get("set", [])), LONGEST),
        "reason": shown(options.get("reason", ""), LONGEST),
        "error": shown(error, LONGEST),
    }
    extra = log_fields.fields(name, using=options["using"], row_count=rows)
    said = wording.action(rows, keys, **texts)
    log_fields.log(logger, logging.INFO, "%s: %s by %s: %s", name, action, by, said, extra=extra)
    if oversight.installed() is None:
        return
    from dcl_processor.ledger import records

    try:
        records.add_action(name, action, by=by, rows=rows, keys=keys, **texts)
    except Exception as raised:  # noqa: BLE001  # as above
        message = "%s: the ledger has no record of this %s: %s"
        log_fields.log(logger, logging.WARNING, message, name, action, raised, extra=extra)
