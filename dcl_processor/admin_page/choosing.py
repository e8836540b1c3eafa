"""Which rows an action takes, and which it leaves and why; chosen as the command chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import router
from django.db.models import Model, QuerySet

from dcl_processor.insights import rows
from dcl_processor.management.acting import DISCARD, MARK_DONE, MISSING, REQUEUE, Action
from dcl_processor.management.command_line import keys as parsed
from dcl_processor.operator.actions import values_to_put_back
from dcl_processor.operator.states import default_age, is_timeless
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.writes import CHANGED, Write, Written
from dcl_processor.options.model_columns import shares_keys
from dcl_processor.processor import BatchProcessor

ACTIONS = {"requeue": REQUEUE, "mark_done": MARK_DONE, "discard": DISCARD}

#: In the place of a state: the rows whose keys were given.
ROWS = "rows"

#: Rows of one confirmation: its form has a field for each, and Django takes a thousand fields.
MOST = 500

#: Seconds that a request waits for an answer about rows.
BUDGET = 5.0

#: Seconds that a request waits for a lock that is not passed over, such as one of the table.
PATIENCE = 1.0


class RefusedError(Exception):
    """An action that is not done; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows an operator wants: those of a state, perhaps of one class of error, or of keys."""

    state: str
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows that an action would be applied to, by key, and what is written to them.

    ``left``: how many are left as they are, by reason; ``has_more``: whether there are more rows
    than one confirmation takes.
    """

    action: str
    wanted: Wanted
    write: Write
    rows: dict[Any, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    has_more: bool = False

    @property
    def act(self) -> Action:
        return ACTIONS[self.action]

    def apply(self, done: Written) -> None:
        """Write to the rows; ``done`` has what is committed, also after an error."""
        self.write.to_free(self.rows, done, seconds=PATIENCE)


def choose(
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str] | None = None,
    *,
    values: dict[str, Any] | None = None,
    reason: str = "",
) -> Plan:
    """Return what an action would do with the rows that are wanted.

    ``keys``: those of them that a person has seen, as the command reads them; ``None``: all.
    Nothing is written, and nothing is locked.
    """
    question = rows.question_of(processor, None)
    with reading(question.using, BUDGET):
        pks = None if keys is None else [*dict.fromkeys(parsed(processor, keys))]
        found = rows.chosen(
            processor,
            question,
            keys=pks if wanted.state == ROWS else None,
            in_doubt=default_age(processor) if wanted.state == "in_doubt" else None,
            kind=wanted.kind,
        )
        if pks is not None:
            found = found.filter(pk__in=pks)
        first = [*dict.fromkeys(found.order_by("pk").values_list("pk", flat=True)[: MOST + 1])]
        some = found.filter(pk__in=first[:MOST])
        write = ACTIONS[action].write(processor, some, values=values, reason=reason)
        choice = write.choose(most_left=0)
    left = dict(choice.numbers)
    if pks is not None and len(pks) > len(first):
        why = MISSING if wanted.state == ROWS else CHANGED
        left = {why: len(pks) - len(first), **left}
    return Plan(action, wanted, write, choice.rows, left, len(first) > MOST)


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
