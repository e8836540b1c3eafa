"""Explains one processor's questions to the database: their SQL, their plan, and their index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import Index, Model

from dcl_processor.candidates import pending_index
from dcl_processor.database.time_limit import reading
from dcl_processor.processor import BatchProcessor

from .statements import Asked, Plan, Statement, plan_of, would_use
from .status import TIMEOUT

#: Rows: a database reads a smaller table as a whole, which is as fast as an index.
SMALL = 1_000


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run would ask, and how the database would answer.

    ``read``: the lock-free read, ``None`` if it is not sent because no row can be pending.
    ``plan``: of the read. ``verdict``: whether an index serves the read, in one sentence.
    ``index``: the one that would, ``None`` if an index serves it already, or none can;
    ``index_model``: the model whose ``Meta`` is to have it; ``is_declared``: it has such an index;
    ``is_chosen``: whether PostgreSQL would choose it now, ``None`` if that was not tried.
    ``in_flight_index``: the one that ``group_by`` needs besides, ``None`` if that ``Meta`` has it.
    ``age_index``: the one from which the age of the oldest pending row can be read, ``None`` if the
    ``Meta`` has it, or no age is asked for. ``remarks``: sentences.
    """

    name: str
    delivery: str
    model: type[Model]
    using: str
    index_model: type[Model]
    verdict: str
    read: str | None = None
    plan: Plan | None = None
    index: Index | None = None
    is_declared: bool = False
    is_chosen: bool | None = None
    in_flight_index: Index | None = None
    age_index: Index | None = None
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation for JSON."""
        plan = self.plan
        return {
            "name": self.name,
            "delivery": self.delivery,
            "database": self.using,
            "read": self.read,
            "plan": None if plan is None else list(plan.lines),
            "rows": None if plan is None else plan.rows,
            "index": None if plan is None else plan.index,
            "verdict": self.verdict,
            "suggested_index": _source(self.index),
            "suggested_index_is_declared": self.is_declared,
            "suggested_index_is_chosen": self.is_chosen,
            "suggested_index_of_rows_in_flight": _source(self.in_flight_index),
            "suggested_index_of_ages": _source(self.age_index),
            "remarks": list(self.remarks),
        }


def explanation(
    processor: BatchProcessor[Any], using: str | None = None, *, seconds: float = TIMEOUT
) -> Explanation:
    """Explain what a run would ask; executes none of it, and locks nothing.

    ``seconds``: the time limit of each question to the database, which may have to wait for a
    migration. Raises the errors of the processor's options and of the database.
    """
    asked = Asked.of(processor, using)
    question, read, indexes = (
        asked.question,
        asked.read(),
        pending_index.suggested(processor, asked.question),
    )
    found = Explanation(
        name=processor.name,
        delivery=str(processor.delivery),
        model=question.model,
        using=question.using,
        index_model=indexes.model,
        verdict="No row can be pending, so nothing is sent.",
    )
    if read is None:
        return found
    with reading(read.using, seconds):
        plan = plan_of(read, question.model)
    index = indexes.read if plan.index is None else None
    return replace(
        found,
        verdict=_verdict(plan, question.using),
        read=read.text,
        plan=plan,
        index=index,
        is_declared=index is not None and pending_index.is_declared(index, indexes.model),
        is_chosen=None if index is None else _would_use(read, indexes.model, index, seconds),
        in_flight_index=_undeclared(indexes.in_flight, indexes.model),
        age_index=_undeclared(asked.age_index(), question.model),
        remarks=tuple(_remarks(asked, plan)),
    )


def _would_use(read: Statement, model: type[Model], index: Index, seconds: float) -> bool | None:
    # An index that the extension cannot have leaves the explanation as it is.
    with suppress(DatabaseError), reading(read.using, seconds):
        return would_use(read, model, index)
    return None


def _source(index: Index | None) -> str | None:
    return None if index is None else pending_index.source(index)


def _undeclared(index: Index | None, model: type[Model]) -> Index | None:
    return None if index is None or pending_index.is_declared(index, model) else index


def _verdict(plan: Plan, using: str) -> str:
    connection = connections[using]
    database: str = connection.display_name
    if not plan.is_judged:
        on = "a table with partitions" if connection.vendor == "postgresql" else database
        return f"Which index serves this read is not judged on {on}: see the plan."
    if plan.index is not None:
        return f"The index {plan.index} serves this read."
    if plan.walks is not None:
        return (
            f"No index serves this read: {database} goes through all entries of {plan.walks}, "
            "until it has found enough pending rows."
        )
    return f"No index serves this read: {database} reads the whole table."


def _remarks(asked: Asked, plan: Plan) -> Iterator[str]:
    processor, question = asked.processor, asked.question
    connection = connections[question.using]
    if connection.vendor == "postgresql" and plan.index is None:
        if plan.rows is None:
            yield (
                "PostgreSQL does not know how many rows the table has, so this may not be its "
                "plan for a large table; run ANALYZE."
            )
        elif plan.rows < SMALL:
            yield (
                f"With about {plan.rows:.0f} rows the table is small, and to read all of it is "
                "right; an index counts when the table has grown."
            )
    if plan.index is None and pending_index.suggested(processor, question).read is None:
        yield (
            f"No index of {question.model._meta.label} can hold a condition of pending: each "
            "depends on other rows, or is no comparison with a constant."
        )
    if connection.settings_dict["OPTIONS"].get("server_side_binding"):
        yield (
            "With server_side_binding the server gets the values apart from the statement: once it "
            "prepares a generic plan (prepare_threshold), that plan uses no partial index."
        )
