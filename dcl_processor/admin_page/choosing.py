"""Which rows an action takes, and which it leaves and why; and those that an operator confirms.

The rows are chosen as the command chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core import signing
from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import Model, QuerySet

from dcl_processor import steady as time
from dcl_processor.database.time_limit import reading
from dcl_processor.definition.model_columns import shares_keys
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_of, key_text
from dcl_processor.management.acting import DISCARD, MARK_DONE, MISSING, REQUEUE, Action
from dcl_processor.management.command_line import keys as parsed
from dcl_processor.operator_actions import values_to_put_back
from dcl_processor.operator_states import default_age, is_timeless
from dcl_processor.operator_writes import Written
from dcl_processor.processor import BatchProcessor

ACTIONS = {"requeue": REQUEUE, "mark_done": MARK_DONE, "discard": DISCARD}

#: In the place of a state: the rows whose keys were given.
ROWS = "rows"

#: Rows of one confirmation, which its form carries.
MOST = 10_000

#: Seconds that a request waits for an answer about rows, and after which it tries no other row.
BUDGET = 5.0


class RefusedError(Exception):
    """An action that is not done; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows an operator wants: those of a state, perhaps of one class of error, or of keys."""

    state: str
    kind: str | None = None


def choose(
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str] = (),
    *,
    values: dict[str, Any] | None = None,
) -> Plan:
    """Return what an action would do with the rows; ``keys``: as the command reads them.

    Nothing is written, and nothing is locked.
    """
    question = rows.question_of(processor, None)
    plan = Plan(processor.name, action, wanted)
    with reading(question.using, BUDGET):
        pks = list(dict.fromkeys(parsed(processor, keys)))
        found = rows.chosen(
            processor,
            question,
            keys=pks if wanted.state == ROWS else None,
            in_doubt=default_age(processor) if wanted.state == "in_doubt" else None,
            kind=wanted.kind,
        )
        first = [*dict.fromkeys(found.order_by("pk").values_list("pk", flat=True)[: MOST + 1])]
        some = found.filter(pk__in=first)
        choice = plan.act.write(processor, some, values=values).choose(most_left=0)
    plan.rows = dict([*choice.rows.items()][:MOST])
    plan.left = dict(choice.numbers)
    plan.has_more = len(first) > MOST
    if len(pks) > len(first) and not plan.has_more:
        plan.left = {MISSING: len(pks) - len(first), **plan.left}
    plan.total = len(plan.rows)
    return plan


def elsewhere(processor: BatchProcessor[Any], listed: QuerySet[Any]) -> str:
    """Return why the rows of a list are not the processor's; empty: they are.

    A key names another row in another table, and in another database. A list without a database of
    its own may read from replicas, and is that of the database to which its rows are written.
    """
    question = rows.question_of(processor, None)
    if not shares_keys(listed.model, question.model):
        return (
            f"{processor.name}: expected a list of {question.model._meta.label}, whose rows the "
            f"processor handles, got one of {listed.model._meta.label}; name the processor in the "
            "list of its own model."
        )
    ours = question.using
    named: Any = listed
    chosen = named._db  # noqa: SLF001  # .db would ask the router, perhaps for a replica
    theirs = chosen or router.db_for_write(listed.model)
    if theirs == ours:
        return ""
    return (
        f"{processor.name}: expected a list of the database {ours!r}, which the processor uses, "
        f"got one of {theirs!r}; return get_queryset(…).using({ours!r}) for the list, or set the "
        f"processor's using={theirs!r}."
    )


def offered(processor: BatchProcessor[Any]) -> dict[str, bool]:
    """Return the actions that the processor has, and whether they need values."""
    try:
        rows.question_of(processor, None)
    except Exception:  # noqa: BLE001  # no row of it can be chosen; the panel has the reason
        return {}
    found = {} if values_to_put_back(processor) is None else {"requeue": False}
    if processor.claim is None or not is_timeless(processor):
        found |= {"mark_done": processor.done is None, "discard": processor.failed is None}
    return found


def anything(model: type[Model]) -> dict[str, Any]:
    """Return values that stand for those that a person is still to type."""
    fields = (each for each in model._meta.concrete_fields if not each.generated)
    return {next(each.name for each in fields if each not in model._meta.pk_fields): None}


# --- what an operator confirms: the rows as they were seen, signed, so that no others are written


#: Seconds for which a confirmation can be used.
MAX_AGE = 3600

#: Seconds that a request waits for a lock that is not passed over, such as one of the table.
PATIENCE = 1.0

#: Reasons for which rows were left that are kept.
MOST_REASONS = 20


@dataclass(slots=True)
class Plan:
    """The rows that an action is still to be applied to, and what has been done so far.

    ``rows``: their keys, each with the digest of the row's marks as it was shown; ``total``: the
    rows that were confirmed; ``done``: those written to; ``left``: how many were left as they are,
    by reason; ``has_more``: whether there were more rows than one confirmation takes.
    """

    name: str
    action: str
    wanted: Wanted
    rows: dict[Any, str] = field(default_factory=dict)
    total: int = 0
    done: int = 0
    left: dict[str, int] = field(default_factory=dict)
    has_more: bool = False

    def signed(self, user: Any) -> str:
        """Return the plan as a text that only this user can send back."""
        document = {
            "name": self.name,
            "action": self.action,
            "wanted": [self.wanted.state, self.wanted.kind],
            "rows": [[key_text(pk), digest] for pk, digest in self.rows.items()],
            "total": self.total,
            "done": self.done,
            "left": self.left,
        }
        return signing.dumps(document, salt=_salt(user), compress=True)

    @classmethod
    def from_text(cls, text: str, processor: BatchProcessor[Any], user: Any) -> Plan:
        """Return the plan of a text; raises ``RefusedError``."""
        try:
            document = signing.loads(text, salt=_salt(user), max_age=MAX_AGE)
            model = rows.question_of(processor, None).model
            found = {key_of(model, pk): digest for pk, digest in document.pop("rows")}
            wanted = Wanted(*document.pop("wanted"))
            plan = cls(**document, wanted=wanted, rows=found)
        except (signing.BadSignature, ValidationError, KeyError, TypeError, ValueError) as error:
            raise RefusedError(NO_PLAN) from error
        if plan.name != processor.name:
            raise RefusedError(NO_PLAN)
        return plan

    @property
    def act(self) -> Action:
        return ACTIONS[self.action]

    def apply(
        self,
        processor: BatchProcessor[Any],
        *,
        values: dict[str, Any] | None = None,
        reason: str = "",
        written: list[Any],
    ) -> None:
        """Write to the rows, in transactions of a few, until the time of a request is used up.

        ``written``: gets the keys of the rows whose write is committed, also before an error.
        """
        end, table = time.monotonic() + BUDGET, rows.question_of(processor, None).table
        write = self.act.write(processor, table.all(), values=values, reason=reason)
        done = Written()
        try:
            write.to_free(self.rows, done, seconds=PATIENCE, stop_at=end)
        finally:
            # Also before an error, or the next try would find the rows changed by this one.
            written += done.written
            self._note(done)

    def _note(self, done: Written) -> None:
        """Count the rows by what became of them; those that were not tried stay in the plan."""
        self.done += len(done.written)
        tried = {*done.written}
        for why, pks in done.left().items():
            known = why in self.left or len(self.left) < MOST_REASONS
            said = why if known else "other reasons"
            self.left[said] = self.left.get(said, 0) + len(pks)
            tried |= {*pks}
        self.rows = {pk: digest for pk, digest in self.rows.items() if pk not in tried}


NO_PLAN = (
    "expected a confirmation that this page made for you in the last hour; choose the rows again."
)


def _salt(user: Any) -> str:
    return f"dcl_processor.admin_page.plan.{user.pk}"
