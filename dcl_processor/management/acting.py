"""``processors requeue``, ``mark-done`` and ``discard``: what an operator does with stuck rows.

The rows are chosen first, with their marks; those that the action would refuse are named, the
number of the others is confirmed, and only these are written to: rows that get stuck afterwards are
left for another look. Each row is locked, and compared with what it was when it was chosen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db.models import Q, QuerySet

from dcl_processor import log_fields, operator_actions, operator_states, oversight
from dcl_processor.candidates.question import Question
from dcl_processor.database.contention import is_database_error, is_statement_timeout
from dcl_processor.database.time_limit import reading
from dcl_processor.diagnosis import explain, one_line
from dcl_processor.errors import printable
from dcl_processor.masking import shown
from dcl_processor.operator_writes import Chosen, Write, Written
from dcl_processor.processor import BatchProcessor
from dcl_processor.worker import this_user

from . import wording
from .choosing import (
    NOT_FOUND_OUT,
    USAGE_ERROR,
    add_time_limit,
    choose,
    duration,
    keys,
    typed_values,
)
from .output import Output

#: Keys that are shown.
SHOWN = 10

#: The exit code if rows were left, or not all was done.
LEFT = 1

#: The exit code after Ctrl-C, as a shell has it: 128 and the number of the signal.
INTERRUPTED = 130

CHANGED, LOCKED = "changed since the choice", "locked by other sessions"
MISSING = "no such row"

Prepare = Callable[[BatchProcessor[Any], QuerySet[Any], dict[str, Any]], Write]

#: A condition that a row has to meet, and why it is left if it does not.
Need = tuple[str, Q]


@dataclass(frozen=True, slots=True)
class Action:
    """One action; ``did``: what has been done to its rows; ``needs``: why it leaves others."""

    HELP: str
    name: str
    did: str
    prepare: Prepare
    needs: str
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
            help="Rows whose claim is older than this, such as 15m, and was never settled.",
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
        add_time_limit(parser, besides=", and for which locked rows are tried again")
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
        (processor,) = choose([options["name"]], run_all=False, left_out=NOT_FOUND_OUT)
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
        choice = self._choose(processor, options)
        done = Written(changed=[*choice.changed])
        result = Result(processor.name, self.did, choice, done, is_dry=options["dry_run"])
        if not output.as_json:
            output.lines(result.left_lines(choice.left))
        if choice.rows and not options["dry_run"]:
            self._act(processor, output, options, result)
        output.answer(result.as_dict(), result.lines())
        if left := result.number_left():
            said = "was left as it is" if left == 1 else "were left as they are"
            raise CommandError(f"{wording.rows(left)} {said}.", returncode=LEFT)

    def _act(
        self,
        processor: BatchProcessor[Any],
        output: Output,
        options: dict[str, Any],
        result: Result,
    ) -> None:
        choice = result.choice
        if not options["yes"]:
            rows = f"{named(choice.rows)} of {processor.name}"
            _confirm(output, f"{rows} will be {self.did}. Continue? [y/N] ")
        trouble = ""
        try:
            choice.write.to_free(choice.rows, result.done, seconds=options["timeout"])
        except KeyboardInterrupt as stopped:
            trouble = "Ctrl-C; perhaps a row more was written to"
            if output.as_json:
                output.document({**result.as_dict(), "error": "stopped"})
            # At least, because it may have come in the middle of a commit.
            number = f"{len(result.done.written):,} of {wording.rows(len(choice.rows))}"
            raise CommandError(
                f"stopped; at least {number} had been {self.did} before.", returncode=INTERRUPTED
            ) from stopped
        except Exception as error:
            said = trouble = explain(error, processor, options["using"]).rstrip(".")
            if output.as_json:
                output.document({**result.as_dict(), "error": said})
            number = f"{len(result.done.written):,} of {wording.rows(len(choice.rows))}"
            raise CommandError(f"{said}; {number} had been {self.did} before.") from error
        finally:
            if (written := result.done.written) or trouble:
                leave_trace(processor, self.name, options, written, error=trouble)

    def _choose(self, processor: BatchProcessor[Any], options: dict[str, Any]) -> Choice:
        """Choose the rows; nothing is written, so that no error leaves anything half done."""
        from dcl_processor.insights import rows  # not for other actions

        try:
            question = rows.question_of(processor, options["using"])
            values = typed_values(question.model, options.get("set", []))
            options = {**options, "values": values or None}
            # The action's own refusals come before the first question.
            self.prepare(processor, question.table.none(), options)
            chosen = Chooser(processor, question, options)
            with reading(question.using, options["timeout"]):
                return chosen.choice(self)
        except CommandError:
            raise
        except Exception as error:
            raise _not_chosen(error, processor, options) from error


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
class Choice:
    """The rows that are to be written to, and by reason the keys of those that are left.

    ``changed``: the keys of rows that changed while the rows were chosen.
    """

    write: Write
    rows: Chosen
    left: dict[str, list[Any]]
    changed: list[Any]


@dataclass(frozen=True, slots=True)
class Chooser:
    """Finds the rows that the options name, and those of them that the action would refuse."""

    processor: BatchProcessor[Any]
    question: Question[Any]
    options: dict[str, Any]

    def choice(self, action: Action) -> Choice:
        rows, missing = self.find()
        left = {MISSING: missing} if missing else {}
        chosen = _keys(rows)
        write = action.prepare(self.processor, rows, self.options)
        for why, condition in [
            ("leased by a worker", write.free),
            *self._needs(),
            (action.needs, write.condition),
        ]:
            if not condition:
                continue
            rows = rows.filter(condition)
            met = set(_keys(rows))
            if others := [pk for pk in chosen if pk not in met]:
                left[why] = others
            chosen = [pk for pk in chosen if pk in met]
        # The rows have to meet all of this again under their locks.
        write = action.prepare(self.processor, rows, self.options)
        # Not a row that has come to be among them just now.
        found = write.choose(among=set(chosen)) if chosen else {}
        return Choice(write, found, left, [pk for pk in chosen if pk not in found])

    def find(self) -> tuple[QuerySet[Any], list[Any]]:
        """Return the rows that the options name, and the keys of which there is no row."""
        options, processor, question = self.options, self.processor, self.question
        if options["in_doubt"] is not None:
            doubtful = processor.in_doubt(older_than=options["in_doubt"])
            return doubtful.using(question.using), []
        if options["given_up"]:
            return self._given_up(), []
        wanted = list(
            dict.fromkeys(
                keys(processor, options["pk"], using=options["using"], unknown=NOT_FOUND_OUT)
            )
        )
        rows = question.table.filter(pk__in=wanted)
        there = set(_keys(rows))
        return rows, [pk for pk in wanted if pk not in there]

    def _given_up(self) -> QuerySet[Any]:
        from dcl_processor.insights import rows  # as above

        try:
            found = rows.given_up(self.processor, self.question)
        except rows.NotRecordedError as error:
            raise CommandError(
                f"expected a processor that records which rows it gave up on, got "
                f"{self.processor.name}: {error}; or name the rows with --pk.",
                returncode=USAGE_ERROR,
            ) from error
        found = self.question.table.none() if found is None else found
        kind: str | None = self.options["error"]
        if kind is None:
            return found
        # Without a column for it there would be no rows, which looks like good news.
        if rows.error_column(self.processor) is None:
            raise CommandError(
                f"expected a processor that stores the last error, got {self.processor.name}; set "
                "retry=Retry(…) with last_error, or leave --error out.",
                returncode=USAGE_ERROR,
            )
        return rows.of_kind(self.processor, found, kind)

    def _needs(self) -> Iterator[Need]:
        """Yield that a claim is old enough for its worker to be gone, if that is to be so."""
        processor = self.processor
        if self.options["given_up"] or self.options["force"]:
            return
        if processor.claim is None or processor.lease is not None:
            return
        if processor.claimed_at is None:
            why = "claimed, and no column has the time: a worker may be at work; use --force"
            yield why, ~operator_states.claimed(processor)
            return
        age = operator_states.default_age(processor)
        why = f"claimed less than {age:g} s ago: a worker may be at work; use --force"
        yield why, operator_states.not_claimed_lately(processor)


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
        yield from self.left_lines(self._left_since())
        if not (self.choice.rows or self.choice.left or self.choice.changed):
            yield f"{self.name}: no rows"

    def left_lines(self, left: dict[str, list[Any]]) -> Iterator[str]:
        for why, pks in left.items():
            yield f"{self.name}: {named(pks)} left: {why}"

    def number_left(self) -> int:
        """Return how many rows were left, but not those that their workers have changed."""
        left = sum(map(len, self.choice.left.values()))
        return left + len(self.done.locked) + len(self.done.failed)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        left = {**self.choice.left, **self._left_since()}
        return {
            "name": self.name,
            "rows": len(self.choice.rows),
            "changed": len(self.done.written),
            "dry_run": self.is_dry,
            "left": [{"pk": _key(pk), "why": why} for why, pks in left.items() for pk in pks],
        }

    def _left_since(self) -> dict[str, list[Any]]:
        found = {CHANGED: self.done.changed, LOCKED: self.done.locked}
        for pk, error in self.done.failed.items():
            found.setdefault(f"the database reported: {one_line(error)}", []).append(pk)
        return {why: pks for why, pks in found.items() if pks}


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


def _keys(rows: QuerySet[Any]) -> list[Any]:
    return list(dict.fromkeys(rows.order_by("pk").values_list("pk", flat=True)))


REQUEUE = Action(
    HELP="Put rows back into pending, as if they had never been tried.",
    name="requeue",
    did="put back into pending",
    prepare=lambda processor, rows, options: operator_actions.to_requeue(
        processor, rows, force=options["force"]
    ),
    needs="done, or not waiting yet; --force puts them back, and repeats their effect",
)
MARK_DONE = Action(
    HELP="Write done to claimed or given up rows whose work turned out to be done.",
    name="mark-done",
    did="marked as done",
    prepare=lambda processor, rows, options: operator_actions.to_mark_done(
        processor, rows, options["values"], force=options["force"]
    ),
    needs="neither claimed nor given up",
    takes_values=True,
)
DISCARD = Action(
    HELP="Give up on rows that are pending or claimed: write failed to them.",
    name="discard",
    did="discarded",
    prepare=lambda processor, rows, options: operator_actions.to_discard(
        processor, rows, options["reason"], options["values"]
    ),
    needs="neither pending nor claimed",
    takes_values=True,
    takes_reason=True,
)


# --- the trace of an action on rows: a record of the log, and one of the ledger if there is one


#: Characters of the values, of the reason and of an error.
LONGEST = 300

logger = logging.getLogger("dcl_processor.operations")


def leave_trace(
    processor: BatchProcessor[Any],
    action: str,
    options: dict[str, Any],
    written: Collection[Any],
    *,
    error: str,
) -> None:
    """Record who has written what to which rows; ``error``: what ended it, if anything did.

    Secrets in texts are masked. An error is logged and not raised, because the rows are written to
    already.
    """
    name, by, rows, keys = processor.name, this_user(), len(written), first_keys(written)
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
        records.add_action(processor, action, by=by, rows=rows, keys=keys, **texts)
    except Exception as raised:  # noqa: BLE001  # as above
        message = "%s: the ledger has no record of this %s: %s"
        log_fields.log(logger, logging.WARNING, message, name, action, raised, extra=extra)
