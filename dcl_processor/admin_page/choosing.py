"""Which rows an action takes, and which it leaves and why; and those that an operator confirms.

The rows are chosen as the command chooses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from django.core import signing
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import router
from django.db.models import Model, QuerySet

from dcl_processor import steady as time
from dcl_processor.candidates.question import Question
from dcl_processor.database.time_limit import reading
from dcl_processor.definition.model_columns import shares_keys
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_of, key_text, parse_pk
from dcl_processor.management.acting import DISCARD, MARK_DONE, MISSING, REQUEUE, Action
from dcl_processor.operator_states import default_age
from dcl_processor.operator_writes import Written
from dcl_processor.processor import BatchProcessor

ACTIONS = {"requeue": REQUEUE, "mark_done": MARK_DONE, "discard": DISCARD}

#: What the actions are called on buttons.
LABELS = {"requeue": "Put back", "mark_done": "Mark as done", "discard": "Discard"}

#: In the place of a state: the rows whose keys were given.
ROWS = "rows"

#: Rows of one confirmation, which its form carries, and of one chunk.
MOST, CHUNK = 10_000, 500

#: Seconds that a request may take to choose rows, or to write to them.
BUDGET = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows an operator wants: those of a state, perhaps of one class of error, or of keys."""

    state: str
    kind: str | None = None

    def among(
        self, processor: BatchProcessor[Any], question: Question[Any]
    ) -> QuerySet[Any, Any] | None:
        """Return the rows; ``None``: any row of the model that has one of the keys."""
        match self.state:
            case "rows":
                return None
            case "in_doubt":
                found = rows.in_doubt(processor, question, default_age(processor))
            case _:
                return rows.given_up_for(processor, question, self.kind)
        found = question.table.none() if found is None else found
        return found if self.kind is None else rows.of_kind(processor, found, self.kind)


def choose(
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[Any] | None = None,
    *,
    values: dict[str, Any] | None = None,
) -> Plan:
    """Look at the rows until the time is used up, and return what an action would do with them.

    ``keys``: those that a person picked; of a state all rows are looked at, in the order of keys.
    Nothing is written, and nothing is locked.
    """
    end = time.monotonic() + BUDGET
    question = rows.question_of(processor, None)
    among = wanted.among(processor, question)
    plan = Plan(processor.name, action, wanted)
    if keys is None:
        among = question.table.none() if among is None else among
        with reading(question.using, BUDGET):
            read = among.order_by("pk").values_list("pk", flat=True)[: MOST + 1]
            keys = list(dict.fromkeys(read))
    for some in chunks(keys):
        if len(plan.rows) >= MOST or plan.has_more or time.monotonic() > end:
            plan.has_more = True
            break
        # One that has left its state meanwhile is left out.
        found = (question.table if among is None else among).filter(pk__in=some)
        with reading(question.using, BUDGET):
            choice = plan.act.write(processor, found, options(values)).choose(most_left=0)
        plan.rows |= choice.rows
        missing = len(some) - len(choice.rows) - choice.numbers.total() if among is None else 0
        for why, number in (+Counter({MISSING: missing}) + choice.numbers).items():
            plan.left[why] = plan.left.get(why, 0) + number
    plan.has_more |= len(keys) > MOST
    plan.total = len(plan.rows)
    return plan


def options(values: dict[str, Any] | None = None, reason: str = "") -> dict[str, Any]:
    """Return the options of the command that does what the page does."""
    return {"given_up": False, "force": False, "values": values, "reason": reason, "using": None}


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
        question = rows.question_of(processor, None)
    except Exception:  # noqa: BLE001  # no row of it can be chosen; the panel has the reason
        return {}
    none = question.table.none()
    found = {}
    for name, action in ACTIONS.items():
        if _can(action, processor, none, options()):
            found[name] = False
        elif action.takes_values and _can(
            action, processor, none, options(anything(question.model))
        ):
            found[name] = True
    return found


def anything(model: type[Model]) -> dict[str, Any]:
    """Return values that stand for those that a person is still to type."""
    fields = (each for each in model._meta.concrete_fields if not each.generated)
    return {next(each.name for each in fields if each not in model._meta.pk_fields): None}


def _can(
    action: Action, processor: BatchProcessor[Any], none: QuerySet[Any], given: dict[str, Any]
) -> bool:
    try:
        action.write(processor, none, given)
    except ImproperlyConfigured:
        return False
    return True


def chunks(keys: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the keys in chunks."""
    for at in range(0, len(keys), CHUNK):
        yield keys[at : at + CHUNK]


def keys_of(processor: BatchProcessor[Any], texts: Sequence[str]) -> list[Any]:
    """Return the primary keys that a form names; raises the errors of ``parse_pk()``.

    ``texts``: escaped as in an address, because a browser changes line breaks in a form's values.
    """
    return list(dict.fromkeys(parse_pk(processor, unquote(text)) for text in texts))


# --- what an operator confirms: the rows as they were seen, signed, so that no others are written


#: Seconds for which a confirmation can be used.
MAX_AGE = 3600

#: Seconds that a chunk waits for a lock that is not passed over, such as one of the table.
PATIENCE = 1.0

#: Seconds after which a request tries no other row, also within a chunk: gunicorn ends a request
#: after 30.
LONGEST = 20.0

#: Reasons for which rows were left that are kept.
MOST_REASONS = 20


class InvalidPlan(Exception):
    """A confirmation that was not made by this page for this user, or is too old."""


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
        """Return the plan of a text; raises ``InvalidPlan``."""
        try:
            document = signing.loads(text, salt=_salt(user), max_age=MAX_AGE)
            if document["name"] != processor.name:
                raise InvalidPlan
            model = rows.question_of(processor, None).model
            return cls(
                document["name"],
                document["action"],
                Wanted(*document["wanted"]),
                {key_of(model, pk): digest for pk, digest in document["rows"]},
                document["total"],
                document["done"],
                document["left"],
            )
        except (signing.BadSignature, ValidationError, KeyError, TypeError, ValueError) as error:
            raise InvalidPlan from error

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
        """Write to the rows, chunk by chunk, until the time of a request is used up.

        ``written``: gets the keys of the rows whose write is committed, also before an error.
        """
        begun, table = time.monotonic(), rows.question_of(processor, None).table
        for some in [*chunks([*self.rows])]:
            seen = {pk: self.rows[pk] for pk in some}
            write = self.act.write(processor, table.filter(pk__in=some), options(values, reason))
            done = Written()
            try:
                write.to_free(seen, done, seconds=PATIENCE, stop_at=begun + LONGEST)
            finally:
                # Also before an error, or the next try would find the rows changed by this one.
                written += done.written
                self._note(done)
            if time.monotonic() > begun + BUDGET:
                return

    def _note(self, done: Written) -> None:
        """Count the rows by what became of them; those that were not tried stay in the plan."""
        self.done += len(done.written)
        self._forget(done.written)
        for why, pks in done.left().items():
            self._leave(why, pks)

    def _leave(self, why: str, pks: list[Any]) -> None:
        known = why in self.left or len(self.left) < MOST_REASONS
        said = why if known else "other reasons"
        self.left[said] = self.left.get(said, 0) + len(pks)
        self._forget(pks)

    def _forget(self, pks: Iterable[Any]) -> None:
        for pk in pks:
            self.rows.pop(pk, None)


def _salt(user: Any) -> str:
    return f"dcl_processor.admin_page.plan.{user.pk}"
