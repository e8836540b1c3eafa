"""The statements that a run sends first, as they are sent; none of them is executed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet, ValidationError
from django.db import connections
from django.db.models import Index, QuerySet

from dcl_processor.candidates import groups, scan
from dcl_processor.candidates.pending_index import Suggested, pending_index, suggested
from dcl_processor.candidates.question import Question, ask
from dcl_processor.definition import model_columns
from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.engine import claim, marking
from dcl_processor.engine.marks import claim_mark, lease_mark
from dcl_processor.locking.wanted import Wanted
from dcl_processor.processor import BatchProcessor
from dcl_processor.runner import limits


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
        if connection.vendor == "postgresql":
            return _text(connection.ops.compose_sql(self.sql, self.params))
        with connection.cursor() as cursor:
            if connection.vendor == "mysql":
                # Django has the text only of a statement that was executed.
                return _text(cursor.mogrify(self.sql, self.params))
            return _text(connection.ops.last_executed_query(cursor, self.sql, self.params))


def compiled(rows: QuerySet[Any, Any]) -> Statement | None:
    """Return the statement of a queryset; ``None`` if it has no row and is not sent."""
    try:
        sql, params = rows.query.get_compiler(rows.db).as_sql()
    except EmptyResultSet:
        return None
    return Statement(sql, params, rows.db)


def _text(filled: str | bytes) -> str:
    return filled.decode() if isinstance(filled, bytes) else filled


@dataclass(frozen=True, slots=True)
class Asked:
    """A processor, and the question that its next run would ask."""

    processor: BatchProcessor[Any]
    question: Question[Any]

    @classmethod
    def of(cls, processor: BatchProcessor[Any], using: str | None = None) -> Asked:
        """Ask as a run does; raises what a run would raise for the options."""
        limits.check_alias("using", using or processor.using)
        options: dict[str, Any] = {
            "label": processor.name,
            "using": using or processor.using,
            "flips": processor._locked_columns,
        }
        # Without the processor's own conditions, because their columns are not checked yet.
        question = ask(processor.pending, **options)
        model_columns.check(processor, question.model, question.using)
        return cls(processor, ask(processor.pending, **options, due=processor._due))

    def read(self) -> Statement | None:
        """Return the lock-free read; ``None`` if the question has no row and is not sent."""
        rows: Any
        if (of_key := self._groups()) is not None:
            rows = groups.first_window(self.question, of_key)
        else:
            rows = scan.first_window(self.question, strict_order=self.processor.strict_order)
        return compiled(rows)

    def estimated(self) -> Statement | None:
        """Return a read of all pending rows, whose plan has the estimated number of them."""
        rows = self.question.unfiltered.order_by().values_list("pk").using(self.question.using)
        return compiled(rows)

    def claim(self, pks: Sequence[Any]) -> list[Statement]:
        """Return the statements that lock these rows and check them again.

        With a delivery that marks its rows, and a question of one table, the same statement marks
        them; this is not so for the first rows of a run. To be called inside ``reading()``, because
        Django compiles a locking statement only inside a transaction.
        """
        question, wanted = self.question, Wanted(pks)
        mark = self._mark()
        try:
            if mark is not None and marking.suits(question):
                update, params = marking.statement(question, mark, wanted)
                found = [(update.sql, params)]
            else:
                found = [*claim.statements(question, wanted)]
        except EmptyResultSet:
            return []
        return [Statement(sql, params, question.using) for sql, params in found]

    def keys(self) -> list[Any]:
        """Return keys of rows, pending or not, as many as a claim may have; the last of the table.

        They are read by the index of the primary key. An empty table has one made-up key.
        """
        size = self.processor.batch_size
        found = [*self.question.table.order_by("-pk").values_list("pk", flat=True)[:size]]
        if found:
            return found[::-1]
        try:
            first, *more = (each.to_python(1) for each in self.question.model._meta.pk_fields)
        except (ValidationError, TypeError, ValueError):
            return []
        return [(first, *more) if more else first]

    def indexes(self) -> Suggested:
        """Return the indexes that serve the reads."""
        return suggested(self.processor, self.question)

    def age_index(self) -> Index | None:
        """Return the index from which the age of the oldest pending row is read.

        ``None``: ``pending_since`` is not set, or is no column of the table.
        """
        since = self.processor.pending_since
        columns = {each.name for each in self.question.model._meta.local_concrete_fields}
        if not isinstance(since, str) or since not in columns:
            return None
        return pending_index(self.question, since=since)

    def _groups(self) -> Groups | None:
        if self.processor.group_by is None:
            return None
        return groups_of(self.processor, self.question.model)

    def _mark(self) -> Any:
        rules = rules_of(self.processor)
        if rules.in_transaction:
            return None
        return claim_mark(self) if rules.marked_by else lease_mark(self)
