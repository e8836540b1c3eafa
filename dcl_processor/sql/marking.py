"""The statement of a claim that is committed before the work: lock, check, mark and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.models.expressions import RawSQL

from dcl_processor.pending.question import Question
from dcl_processor.report.values import Values
from dcl_processor.sql.compiled import (
    Assigned,
    Keys,
    Rows,
    Statement,
    Template,
    bound_keys,
    shape,
    update_sql,
)
from dcl_processor.sql.statements import LOCK, failing, first_of, own_key, still_pending
from dcl_processor.sql.steps import Wanted, by_key


def _still_free(question: Question[Any], *, hides: bool) -> tuple[str, list[Any]]:
    """Return the SQL of a marked row's key if another claim could take it, or else of NULL."""
    # Race: double claim. A mark that is not kept would let another worker take the row.
    if question.asks_own_row if hides else question.own_table:
        return still_pending(question, question.unfiltered if hides else question.queryset)
    return "NULL", []


class Marking:
    """Lock rows, check them, write a mark and return them, in one statement.

    Rows that have keys are locked already. ``bare``: the rows are locked and checked already.
    ``hides``: the mark takes a row out of ``pending``, and not only out of what is due. The
    statement fails if it does not. Each answer has the columns that the question selects, followed
    by the row's key, the old values of the marked columns, and their new values.
    """

    def __init__(
        self,
        question: Question[Any],
        wanted: Wanted,
        mark: Values,
        *,
        hides: bool,
        bare: bool = False,
    ) -> None:
        self._names = [*mark]
        has_keys = question.claims is not None and not bare
        many = len(wanted.pks) > 1 and not has_keys
        name = "mark", bare, hides, wanted.choice, many, shape(mark)
        if name not in question.cache:
            compiled = self._compiled(question, wanted, mark, hides=hides, bare=bare, many=many)
            question.cache[name] = compiled
        self.rows, self._columns, keys, assigned, template, _ = question.cache[name]
        connection = connections[question.using]
        bound = assigned.bound(mark, connection)
        if not has_keys:
            bound[keys] = bound_keys(question.model, question.using, wanted.pks, many=many)
        self.statement = template.bind(bound)

    def _compiled(
        self,
        question: Question[Any],
        wanted: Wanted,
        mark: Values,
        *,
        hides: bool,
        bare: bool,
        many: bool,
    ) -> tuple[Any, ...]:
        keys, assigned = Keys(question.model, many=many), Assigned(question.model, mark)
        has_keys = question.claims is not None and not bare
        some = question.table if bare else question.queryset
        asked = question.keyed(()) if has_keys else some.filter(keys.condition)
        rows = Rows(asked.order_by(), question.using)
        meta, compiler = question.model._meta, asked.query.get_compiler(question.using)
        fields: list[Any] = [meta.get_field(name) for name in self._names]
        quote = compiler.connection.ops.quote_name
        own, key = quote(meta.db_table), own_key(question)
        after = [f"{own}.{quote(f.column)}" for f in fields]
        # As they are stored: a field may change its SELECT.
        before: dict[str, Any] = {f"dcl_before_{n}": RawSQL(sql, ()) for n, sql in enumerate(after)}  # noqa: S611
        first = first_of(asked, wanted, keys.order).annotate(**before).values_list("pk", *before)
        locking, locking_params = first.query.get_compiler(question.using).as_sql()
        update, update_params = update_sql(question.table, assigned.columns)
        still, still_params = _still_free(question, hides=hides)
        columns = [each.get_col(meta.db_table) for each in (meta.pk_fields[0], *fields, *fields)]
        returned = [*rows.selected_sql, key, *(f"dcl_taken.{n}" for n in before), *after]
        lock = "" if bare or has_keys else f" {LOCK}"
        # If it is not materialised, the planner may lock one set of rows and update another.
        sql = (
            f"WITH dcl_taken (taken, {', '.join(before)}) AS MATERIALIZED ({locking}{lock}) "
            f"{update} FROM dcl_taken WHERE {key} = dcl_taken.taken "
            f"RETURNING {', '.join(returned)}, {failing(still)}"
        )
        params = [*locking_params, *update_params, *rows.selected_params, *still_params]
        needed = [*[keys.placeholder] * (not has_keys), *assigned.places.values()]
        template = Template(sql, params, needed)
        read = compiler, compiler.get_converters(columns)
        return rows, read, keys.placeholder, assigned, template, mark

    def marks(self, answers: Sequence[Any]) -> tuple[dict[Any, Values], dict[Any, Values]]:
        """Return the old and the new values of the marked columns, by the rows' keys."""
        before: dict[Any, Values] = {}
        after: dict[Any, Values] = {}
        width, (compiler, converters) = len(self.rows.selected), self._columns
        behind = [answer[width:-1] for answer in answers]
        if converters:
            behind = compiler.apply_converters(behind, converters)
        for pk, *columns in behind:
            number = len(self._names)
            before[pk] = dict(zip(self._names, columns[:number], strict=True))
            after[pk] = dict(zip(self._names, columns[number:], strict=True))
        return before, after

    def taken(
        self, question: Question[Any], answers: Sequence[Any], pks: Sequence[Any]
    ) -> tuple[dict[Any, Any], dict[Any, Values], dict[Any, Values]]:
        """Return the marked rows, with the old and the new values of the marked columns."""
        before, after = self.marks(answers)
        try:
            return by_key(question, self.rows.build(answers), pks), before, after
        except Exception:
            # The claim is committed, so rows that cannot be passed to the handler are put back.
            for pk, values in before.items():
                question.table.filter(pk=pk, **after[pk]).update(**values)
            raise

    def undoing(self, result: Any | None) -> list[Statement]:
        """Return what writes the old values again, for an answer that the driver cannot read.

        They are written as the server has sent them, to rows that still have the new ones.
        """
        if result is None:
            return []
        (compiler, _), width, number = self._columns, len(self.rows.selected), len(self._names)
        meta, quote = compiler.query.get_meta(), compiler.connection.ops.quote_name
        names = [quote(meta.get_field(name).column) for name in self._names]
        same = "".join(f" AND {name} IS NOT DISTINCT FROM %s" for name in names)
        sql = (
            f"UPDATE {quote(meta.db_table)} SET {', '.join(f'{name} = %s' for name in names)} "  # noqa: S608
            f"WHERE {quote(meta.pk.column)} = %s{same}"
        )
        statements = []
        for at in range(result.ntuples):
            sent = [result.get_value(at, width + each) for each in range(2 * number + 1)]
            key, *values = [each if each is None else each.decode() for each in sent]
            statements.append(Statement(sql, [*values[:number], key, *values[number:]]))
        return statements
