"""Explains one processor's questions to the database: their SQL, their plan, and their index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Index, Model, QuerySet

from dcl_processor.candidates import groups, scan
from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.time_limit import reading
from dcl_processor.options import model_columns
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor

from . import catalog, pending_index, rows
from .answer import TIMEOUT


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run would ask, and how the database would answer.

    ``read``: the lock-free read, ``None`` if it is not sent because no row can be pending.
    ``plan``: of the read. ``verdict``: whether an index serves the read, in one sentence.
    ``index``: the one that would, ``None`` if an index serves it already, or none can;
    ``index_model``: the model whose ``Meta`` is to have it; ``is_declared``: it has such an index.
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
            "index": None if plan is None else plan.index,
            "verdict": self.verdict,
            "suggested_index": _source(self.index),
            "suggested_index_is_declared": self.is_declared,
            "suggested_index_of_rows_in_flight": _source(self.in_flight_index),
            "suggested_index_of_ages": _source(self.age_index),
            "remarks": list(self.remarks),
        }


def explanation(
    processor: BatchProcessor[Any], using: str | None = None, *, seconds: float = TIMEOUT
) -> Explanation:
    """Explain what a run would ask; executes none of it, and locks nothing.

    ``seconds``: the time limit of each question to the database, which may have to wait for a
    migration. Raises ``Unsupported`` unless the database is PostgreSQL, and the errors of the
    processor's options and of the database.
    """
    asked = Asked.of(processor, using)
    _refuse_others(processor, asked.question.using)
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
        verdict=_verdict(plan),
        read=read.text,
        plan=plan,
        index=index,
        is_declared=index is not None and pending_index.is_declared(index, indexes.model),
        in_flight_index=_undeclared(indexes.in_flight, indexes.model),
        age_index=_undeclared(asked.age_index(), question.model),
        remarks=tuple(_remarks(asked, plan)),
    )


def _refuse_others(processor: BatchProcessor[Any], using: str) -> None:
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise Unsupported(
            f"{processor.name}: expected PostgreSQL for explain, whose plans are judged, got "
            f"{connection.display_name}; read the plan that its own EXPLAIN shows."
        )


def _source(index: Index | None) -> str | None:
    return None if index is None else pending_index.source(index)


def _undeclared(index: Index | None, model: type[Model]) -> Index | None:
    return None if index is None or pending_index.is_declared(index, model) else index


def _verdict(plan: Plan) -> str:
    if not plan.is_judged:
        return "The table has partitions, so which index serves this read is not judged."
    if plan.index is not None:
        return f"The index {plan.index} serves this read."
    if plan.walks is not None:
        return (
            f"No index serves this read: PostgreSQL goes through all entries of {plan.walks}, "
            "until it has found enough pending rows."
        )
    return "No index serves this read: PostgreSQL reads the whole table."


def _remarks(asked: Asked, plan: Plan) -> Iterator[str]:
    processor, question = asked.processor, asked.question
    connection = connections[question.using]
    if plan.index is None:
        yield (
            "A small table is read as a whole with any index: ask about one with thousands of "
            "rows, after ANALYZE."
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


# --- the first statement of a run, which is not executed here


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, its parameters, and the alias that it is sent to."""

    sql: str
    params: Sequence[Any]
    using: str

    @property
    def text(self) -> str:
        """The statement with literal values."""
        connection: Any = connections[self.using]
        if not self.params:
            # The driver does the same with the placeholders' escapes.
            return self.sql.replace("%%", "%")
        filled: str | bytes = connection.ops.compose_sql(self.sql, self.params)
        return filled.decode() if isinstance(filled, bytes) else filled


def compiled(rows: QuerySet[Any, Any]) -> Statement | None:
    """Return the statement of a queryset; ``None`` if it has no row and is not sent."""
    try:
        sql, params = rows.query.get_compiler(rows.db).as_sql()
    except EmptyResultSet:
        return None
    return Statement(sql, params, rows.db)


@dataclass(frozen=True, slots=True)
class Asked:
    """A processor, and the question that its next run would ask."""

    processor: BatchProcessor[Any]
    question: Question[Any]

    @classmethod
    def of(cls, processor: BatchProcessor[Any], using: str | None = None) -> Asked:
        """Ask as a run does; raises what a run would raise for the options."""
        # Without the processor's own conditions, because their columns are not checked yet.
        question = rows.question_of(processor, using)
        model_columns.check(processor, question.model, question.using)
        return cls(processor, rows.question_of(processor, using, processor._due))

    def read(self) -> Statement | None:
        """Return the lock-free read; ``None`` if the question has no row and is not sent."""
        rows: Any
        if (of_key := self._groups()) is not None:
            rows = groups.first_window(self.question, of_key)
        else:
            rows = scan.first_window(self.question)
        return compiled(rows)

    def age_index(self) -> Index | None:
        """Return the index from which the age of the oldest pending row is read.

        ``None``: ``pending_since`` is not set, or is no column of the table.
        """
        since = self.processor.pending_since
        columns = {each.name for each in self.question.model._meta.local_concrete_fields}
        if not isinstance(since, str) or since not in columns:
            return None
        return pending_index.pending_index(self.question, since=since)

    def _groups(self) -> Groups | None:
        if self.processor.group_by is None:
            return None
        return groups_of(self.processor, self.question.model)


# --- how the database would execute a statement, which is not executed for that
#
# The statement is sent with EXPLAIN before it on the connection of its run, with the same
# parameters: a server that gets the parameters apart from the statement may plan differently.


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. ``lines``: as PostgreSQL shows it.

    ``index``: the index of the table by which only some of its rows are read, if there is one.
    ``walks``: an index whose every entry is read instead, in its order. ``is_judged``: whether the
    plan shows how the table is read.
    """

    lines: tuple[str, ...]
    index: str | None = None
    walks: str | None = None
    is_judged: bool = False


def plan_of(statement: Statement, model: type[Model]) -> Plan:
    """Return the plan by which the statement reads the model's table."""
    lines = tuple(line for (line,) in _explain(statement, "EXPLAIN"))
    known = catalog.indexes(statement.using, model)
    partial = {each.name for each in known if each.is_partial}
    name = _bare(model._meta.db_table)
    reads = [node for node in _nodes(_json(statement)) if node.get("Relation Name") == name]
    if not reads:  # a table with partitions, or a view
        return Plan(lines)
    used = [each for node in reads for each in _used(node)]
    # All rows of a partial index are asked for; of another one, those that meet a condition.
    narrow = [name for name, has_condition in used if has_condition or name in partial]
    wide = [name for name, _ in used if name not in narrow]
    index = narrow[0] if len(narrow) >= len(reads) else None
    return Plan(lines, index, wide[0] if wide else None, is_judged=True)


def _json(statement: Statement) -> Any:
    ((found,),) = _explain(statement, "EXPLAIN (FORMAT JSON)")
    return (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _bare(table: str) -> str:
    """Return a table's name without its schema and its quotes, as a plan has it."""
    return re.sub(r'^.*?"?\."?(?=[^.]+$)', "", table).strip('"')


def _used(node: Any) -> Iterator[tuple[str, bool]]:
    """Yield the indexes that a read of a table uses, and whether it looks up a part of them."""
    for each in _nodes(node):
        if "Index Name" in each:
            yield each["Index Name"], "Index Cond" in each


def _explain(statement: Statement, how: str) -> list[Any]:
    return catalog.rows(statement.using, f"{how} {statement.sql}", statement.params)
