"""Explains one processor's lock-free read to PostgreSQL: its SQL, its plan, and its index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db import connections
from django.db.models import Index, Model

from dcl_processor.insights import catalog, pending_index
from dcl_processor.insights.answer import TIMEOUT
from dcl_processor.keys.columns import reads_of
from dcl_processor.operator.backlog import question_of
from dcl_processor.operator.time_limit import reading
from dcl_processor.options import model_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question
from dcl_processor.report.exceptions import Unsupported

_PARTIAL = """
SELECT relname FROM pg_index JOIN pg_class ON oid = indexrelid WHERE indpred IS NOT NULL"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run would ask, and how PostgreSQL would answer.

    ``read``: the lock-free read, empty if it is not sent because no row can be pending. ``plan``:
    its lines. ``index``: the one that serves it. ``verdict``: whether one does, in one sentence.
    ``indexes``: to be pasted into the model's ``Meta``; that of the read first, unless it has one.
    """

    name: str
    delivery: str
    model: type[Model]
    using: str
    verdict: str
    read: str = ""
    plan: tuple[str, ...] = ()
    index: str | None = None
    indexes: tuple[Index, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation for JSON."""
        return {
            "name": self.name,
            "delivery": self.delivery,
            "database": self.using,
            "read": self.read,
            "plan": list(self.plan),
            "index": self.index,
            "verdict": self.verdict,
            "suggested_indexes": [pending_index.source(each) for each in self.indexes],
        }


def explanation(
    processor: Definition[Any], using: str | None = None, *, seconds: float = TIMEOUT
) -> Explanation:
    """Explain what a run would ask; executes none of it, and locks nothing.

    ``seconds``: the time limit of each question to the database, which may have to wait for a
    migration. Raises ``Unsupported`` unless the database is PostgreSQL, and the errors of the
    processor's options and of the database.
    """
    question = asked(processor, using)
    model, connection = question.model, connections[question.using]
    if connection.vendor != "postgresql":
        raise Unsupported(
            f"{processor.name}: expected PostgreSQL for explain, whose plans are judged, got "
            f"{connection.display_name}; read the plan that its own EXPLAIN shows."
        )
    known = processor.name, str(processor.delivery), model, question.using
    first = _read(processor, question)
    if first is None:
        return Explanation(*known, "No row can be pending, so nothing is sent.")
    sql, params = first
    with reading(question.using, seconds):
        lines = tuple(line for (line,) in _explain(question.using, "EXPLAIN", sql, params))
        ((found,),) = _explain(question.using, "EXPLAIN (FORMAT JSON)", sql, params)
        tree = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
        verdict, index = _judged(tree, question)
    serving, *others = pending_index.suggested(processor, question)
    if index is None:
        verdict += _remark(serving, model)
        others.insert(0, serving)
    missing = [each for each in others if each and not pending_index.is_declared(each, model)]
    text = _with_values(connection, sql, params)
    return Explanation(*known, verdict, text, lines, index, tuple(missing))


def _remark(suggested: Index | None, model: type[Model]) -> str:
    if suggested is None:
        return (
            f" No index of {model._meta.label} can hold a condition of pending: each depends on "
            "other rows, or is no comparison with a constant."
        )
    if pending_index.is_declared(suggested, model):
        return f" {model._meta.label} has one in its Meta: run manage.py migrate, and ANALYZE."
    return ""


def asked(processor: Definition[Any], using: str | None = None) -> Question[Any]:
    """Return the question of the next run; raises what that would raise for the options."""
    # Without the processor's own conditions, because their columns are not checked yet.
    question = question_of(processor, using)
    model_columns.check(processor, question.model)
    reads_of(processor, question.model, question.using)
    return question_of(processor, using, processor._due)


class _FirstStatement(Exception):
    """Stands for the answer of a statement that is not sent."""


def _read(processor: Definition[Any], question: Question[Any]) -> tuple[str, Any] | None:
    """Return the first statement of a run; ``None``: no row can be pending, and none is sent."""

    def keep(_: Any, sql: str, params: Any, *__: Any) -> Any:
        raise _FirstStatement(sql, params)

    reads = reads_of(processor, question.model, question.using)
    query, lease = question.queryset.query, processor.lease
    asked = replace(question, lease=None if lease is None else lease.field)
    try:
        with connections[question.using].execute_wrapper(keep):
            if reads is not None:
                reads.read(question.unfiltered, question.narrowed, None, ())
            elif query.order_by or query.extra_order_by:
                next(scan.ordered_scan(lambda: asked, set()), None)
            else:
                next(iter(scan.KeyScan(lambda: asked, set())), None)
    except _FirstStatement as first:
        sql, params = first.args
        return sql, params
    return None


def _with_values(connection: Any, sql: str, params: Sequence[Any]) -> str:
    """Return the statement with literal values."""
    filled: str | bytes = connection.ops.compose_sql(sql, params)
    return filled.decode() if isinstance(filled, bytes) else filled


def _explain(using: str, how: str, sql: str, params: Sequence[Any]) -> list[Any]:
    # On the connection of a run, with the same parameters: a server that gets these apart from the
    # statement may plan differently.
    return catalog.rows(using, f"{how} {sql}", params)


def _judged(plan: Any, question: Question[Any]) -> tuple[str, str | None]:
    """Return whether an index serves the read, in one sentence, and which."""
    model = question.model
    partial = {name for (name,) in catalog.rows(question.using, _PARTIAL)}
    table = re.sub(r'^.*?"?\."?(?=[^.]+$)', "", model._meta.db_table).strip('"')
    reads = [node for node in _nodes(plan) if node.get("Relation Name") == table]
    if not reads:  # a table with partitions, or a view
        return "The table has partitions, so which index serves this read is not judged.", None
    used = [each for node in reads for each in _nodes(node) if "Index Name" in each]
    # All rows of a partial index are asked for; of another one, those that meet a condition.
    narrow = [n["Index Name"] for n in used if "Index Cond" in n or n["Index Name"] in partial]
    if len(narrow) >= len(reads):
        return f"The index {narrow[0]} serves this read.", narrow[0]
    how = "reads the whole table"
    if wide := [n["Index Name"] for n in used if n["Index Name"] not in narrow]:
        how = f"goes through all entries of {wide[0]}, until it has found enough pending rows"
    return (
        f"No index serves this read: PostgreSQL {how}. (It reads a small table as a whole with any "
        "index: ask about one with thousands of rows, after ANALYZE.)"
    ), None


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)
