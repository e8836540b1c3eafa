"""Explains one processor's lock-free read to PostgreSQL: its SQL, its plan, and an index for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from django.db import connections
from django.db.models import Index, Model, Q
from django.db.models.expressions import Col

from dcl_processor.insights.answer import TIMEOUT
from dcl_processor.keys.columns import column_of, reads_of
from dcl_processor.operator.states import question_of
from dcl_processor.operator.times import reading
from dcl_processor.options import model_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report.exceptions import Unsupported
from dcl_processor.report.values import is_constant

#: Comparisons with a constant that are conditions of an index, and those whose column it has.
_PLAIN, _RANGES = ("exact", "in", "isnull"), ("gt", "gte", "lt", "lte", "range")

#: Characters of the longest name of an index that every database accepts.
_LONGEST_NAME = 30


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run would ask, and how PostgreSQL would answer.

    ``read``: the SQL of the lock-free read; ``plan``: its lines. ``indexes``: those that the
    model's ``Meta`` lacks, first that of the read.
    """

    name: str
    delivery: str
    model: type[Model]
    using: str
    read: str
    plan: tuple[str, ...]
    indexes: tuple[Index, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation for JSON."""
        return {
            "name": self.name,
            "delivery": self.delivery,
            "database": self.using,
            "read": self.read,
            "plan": list(self.plan),
            "suggested_indexes": self.code(),
        }

    def code(self) -> list[str]:
        """Return the indexes as Python code for the model's ``Meta``, as a migration writes it."""
        from django.db.migrations.writer import MigrationWriter  # not for the start of each process

        return [MigrationWriter.serialize(each)[0] for each in self.indexes]


def explanation(
    processor: Definition[Any], using: str | None = None, *, seconds: float = TIMEOUT
) -> Explanation:
    """Explain how a run reads pending rows; executes nothing, and locks nothing.

    ``seconds``: the time limit of the question, which may have to wait for a migration. Raises
    ``Unsupported`` unless the database is PostgreSQL, and the errors of the processor's options and
    of the database.
    """
    question = asked(processor, using)
    model, connection = question.model, connections[question.using]
    operations: Any = connection.ops
    if connection.vendor != "postgresql":
        raise Unsupported(
            f"{processor.name}: expected PostgreSQL for explain, got {connection.display_name}; "
            "read the plan that its own EXPLAIN shows."
        )
    order = [*_key(processor, model), *question.queryset.query.order_by, "pk"]
    read = question.queryset.order_by(*order).values_list("pk", flat=True)[:WINDOW]
    with reading(question.using, seconds):
        plan = read.explain()
    declared = [(each.fields, each.condition) for each in model._meta.indexes]
    missing = [
        each
        for each in suggested(processor, question)
        if (each.fields, each.condition) not in declared
    ]
    return Explanation(
        name=processor.name,
        delivery=str(processor.delivery),
        model=model,
        using=question.using,
        read=operations.compose_sql(*read.query.sql_with_params()),
        plan=tuple(plan.splitlines()),
        indexes=tuple(missing),
    )


def asked(processor: Definition[Any], using: str | None = None) -> Question[Any]:
    """Return the question of the next run; raises what that would raise for the options."""
    # Without the processor's own conditions, because their columns are not checked yet.
    question = question_of(processor, using)
    model_columns.check(processor, question.model)
    reads_of(processor, question.model, question.using)
    return question_of(processor, using, processor._due)


# --- the index


def suggested(processor: Definition[Any], question: Question[Any]) -> Iterator[Index]:
    """Yield the index of the lock-free read, and that of the rows of a key at work, if any.

    A partial index of the pending rows alone is as small as the backlog. Its condition has to
    follow from the question whenever that is asked, so a column that is compared with a time is
    indexed instead. Each condition of ``pending`` that is no plain comparison is left out.
    """
    model, lease = question.model, processor.lease
    key, (equal, between) = _key(processor, model), _comparisons(question)
    names = {each.name for each in model._meta.local_concrete_fields}
    asked = map(str, question.queryset.query.order_by)
    order = takewhile(lambda each: each.lstrip("-") in names, asked)
    if key or equal or between:
        pk = [each.name for each in model._meta.pk_fields]
        fields = dict.fromkeys([*key, *order, *between, *pk])
        yield _index(processor, "pending", [*fields], Q(**equal) or None)
    at = processor.claimed_at if lease is None else lease.field
    if processor.group_by is not None and at is not None:
        yield _index(processor, "in_flight", key, Q(**{f"{at}__isnull": False}))


def _index(
    processor: Definition[Any], kind: str, fields: Sequence[str], condition: Q | None
) -> Index:
    name = f"{kind}_{processor.name.rpartition('.')[2]}"[:_LONGEST_NAME]
    return Index(fields=fields, condition=condition, name=name)


def _key(processor: Definition[Any], model: type[Model]) -> list[str]:
    """Return the field of the keys whose rows are read together; nothing without keys."""
    option = "group_by" if processor.group_by is not None else "fair_by"
    if getattr(processor, option) is None:
        return []
    field: Any = model._meta.get_field(column_of(processor, option, model))
    return [field.name]


def _comparisons(question: Question[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the conditions that are comparisons with a constant, and the columns of the others."""
    query, equal, between = question.unfiltered.query, dict[str, Any](), list[str]()
    node: Any
    for node in query.where.children:
        lookup, column = getattr(node, "lookup_name", ""), getattr(node, "lhs", None)
        if not isinstance(column, Col) or column.alias != query.base_table:
            continue
        name = column.target.name
        if lookup in _RANGES:
            between.append(name)
        elif lookup in _PLAIN and is_constant(node.rhs):
            equal[f"{name}__{lookup}".removesuffix("__exact")] = node.rhs
    return equal, between
