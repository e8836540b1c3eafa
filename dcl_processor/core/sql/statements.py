"""The statements of the steps on PostgreSQL: claims, flips, marks and settlements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import DataError, connections
from django.db.models import Expression, IntegerField, Q, QuerySet

from dcl_processor.core.pending.question import Question
from dcl_processor.core.report.exceptions import TransactionLost
from dcl_processor.core.report.values import Values
from dcl_processor.core.sql.compiled import (
    Assigned,
    Build,
    CannotCompile,
    Keys,
    Placeholder,
    Rows,
    Statement,
    Template,
    bound_keys,
    select,
    shape,
    update_sql,
)
from dcl_processor.core.sql.session import Wanted, not_written

XID = "pg_current_xact_id()"
LOCK = "FOR NO KEY UPDATE SKIP LOCKED"

#: The text of the error with which a flip fails; ``LOST``: in another transaction.
FLIP, LOST = "dcl_flip:", "lost"


def _first(queryset: QuerySet[Any, Any], wanted: Wanted, order: Any) -> QuerySet[Any, Any]:
    """Limit a queryset to the first of the wanted rows, if more are named."""
    if not wanted.may_choose:
        return queryset.order_by()
    ordered = queryset.order_by(order)
    ordered.query.standard_ordering = True  # order_by() does not undo a reverse()
    return ordered[: wanted.limit]


def _choice(wanted: Wanted) -> int | None:
    return wanted.limit if wanted.may_choose else None


def locked_question(question: Question[Any], wanted: Wanted) -> tuple[Statement, Build]:
    """Return the statement that locks the rows and checks them."""

    def narrow(condition: Q, order: Any) -> QuerySet[Any, Any]:
        return _first(question.queryset.filter(condition), wanted, order)

    name = "claim", _choice(wanted)
    return select(
        question.cache, name, question.model, question.using, wanted.pks, narrow, _locks(question)
    )


def locked_keys(question: Question[Any], pks: Sequence[Any]) -> tuple[Statement, Build]:
    """Return the statement that locks the rows by their keys; it joins no table."""

    def narrow(condition: Q, _: Any) -> QuerySet[Any, Any]:
        columns = ["pk", question.key] if question.key else ["pk"]
        return question.table.filter(condition).order_by().values_list(*columns)

    change = _locks(question) if question.lock_key is None else _locks_keys(question)
    return select(question.cache, "lock", question.model, question.using, pks, narrow, change)


def asked_again(question: Question[Any], pks: Sequence[Any]) -> tuple[Statement, Build]:
    """Return the statement that asks the whole question for these rows."""

    def narrow(condition: Q, _: Any) -> QuerySet[Any, Any]:
        return question.queryset.filter(condition).order_by()

    return select(question.cache, "ask", question.model, question.using, pks, narrow)


def _locks(question: Question[Any]) -> Any:
    own = f'"{question.model._meta.db_table}"'.replace('""', '"')

    def change(sql: str) -> str:
        # The id of the transaction is no annotation: that would be an attribute of the instances.
        return f"{sql.replace(f' FROM {own}', f', {XID} FROM {own}', 1)} {LOCK}"

    return change


def _locks_keys(question: Question[Any]) -> Any:
    """Lock the keys of rows, too; the outer condition is not evaluated for any other row."""
    assert question.lock_key is not None
    condition = question.lock_key("dcl_rows.key")

    def change(sql: str) -> str:
        rows = f"({sql} {LOCK}) AS dcl_rows (pk, key)"
        return f"SELECT dcl_rows.pk, {XID} FROM {rows} WHERE {condition}"

    return change


#: A statement that fails unless the transaction has the id that is its parameter.
FENCE_SQL = f"SELECT CAST(CASE WHEN {XID} = %s::xid8 THEN '0' ELSE '{FLIP}{LOST}' END AS integer)"


def checked_flip(
    question: Question[Any], pks: Sequence[Any], values: Values, xid: str
) -> Statement:
    """Return a statement that writes these rows in the transaction with this id, or fails.

    It fails, too, if it writes fewer rows than there are, and may not if the handler deleted one.
    """
    many, cache = len(pks) > 1, question.cache
    name = "flip", many, shape(values)
    if name not in cache or name[-1] is None:
        try:
            cache[name] = _compiled_flip(question, values, many=many)
        except CannotCompile:
            cache[name] = None
    if cache[name] is not None:
        keys, fence, number, assigned, template, _ = cache[name]
        try:
            bound = assigned.bound(values, _connection(question))
        except CannotCompile:
            return _flip_of(question, pks, values, xid)
        bound_pks = bound_keys(question.model, question.using, pks, many=many)
        return template.bind({**bound, keys: bound_pks, fence: xid, number: len(pks)})
    return _flip_of(question, pks, values, xid)


def _connection(question: Question[Any]) -> Any:
    return connections[question.using]


def _compiled_flip(question: Question[Any], values: Values, *, many: bool) -> tuple[Any, ...]:
    keys, assigned = Keys(question.model, many=many), Assigned(question.model, values)
    fence, number = Placeholder(IntegerField()), Placeholder(IntegerField())
    sql, params = _checked(question, keys.condition, assigned.columns, fence, number)
    template = Template(sql, params, [keys.placeholder, *assigned.placeholders])
    # The values are kept, so that the identity of an expression in the name stays its own.
    return keys.placeholder, fence, number, assigned, template, values


def _flip_of(question: Question[Any], pks: Sequence[Any], values: Values, xid: str) -> Statement:
    return Statement(*_checked(question, Q(pk__in=[*pks]), values, xid, len(pks)))


def _checked(
    question: Question[Any], rows: Q, columns: Values, xid: Any, number: Any
) -> tuple[str, list[Any]]:
    # Race: flip without work. The COMMIT is in the same message, and only an error skips it. The
    # cast is that error. It depends on the count, and so is not evaluated before it.
    update, params = update_sql(question.table.filter(rows), columns)
    where = " WHERE " + update.rpartition(" WHERE ")[2]
    fenced = update.replace(where, f" WHERE ({where[7:]} AND {XID} = %s)")
    there, keys = question.table.filter(rows).order_by().values_list("pk").query.sql_with_params()
    sql = (
        f"WITH dcl_flipped AS ({fenced} RETURNING 1) "  # noqa: S608
        f"SELECT CAST(CASE WHEN count(*) = %s THEN '0' WHEN NOT {XID} = %s::xid8 "
        f"THEN '{FLIP}{LOST}' WHEN count(*) = (SELECT count(*) FROM ({there}) AS dcl_there) "
        f"THEN '0' ELSE '{FLIP}' END AS integer) FROM dcl_flipped"
    )
    return sql, [*params, xid, number, xid, *keys]


def explained(error: Exception, label: str, pks: Sequence[Any]) -> Exception:
    """Return what the error of a message with flips means."""
    text = str(error) if isinstance(error, DataError) else ""
    if FLIP + LOST in text:
        return TransactionLost()
    return not_written(label, pks) if FLIP in text else error


def settling(
    question: Question[Any], pk: Any, expected: Values, values: Values
) -> Statement | None:
    """Return the update of a row that still has the expected values; ``None``: none is compiled."""
    one = {name: v[0] if isinstance(v, list) and len(v) == 1 else v for name, v in expected.items()}
    kinds = shape(values)
    if kinds is None or any(isinstance(v, list) or v is None for v in one.values()):
        return None
    cache, name = question.cache, ("settle", *one, kinds)
    if name not in cache:
        cache[name] = _compiled_settling(question, one, values)
    if cache[name] is None:
        return None
    keys, places, assigned, template, _ = cache[name]
    connection = _connection(question)
    try:
        bound = assigned.bound(values, connection)
    except CannotCompile:
        return None
    for each, place in places.items():
        bound[place] = place.output_field.get_db_prep_value(one[each], connection)
    bound[keys] = bound_keys(question.model, question.using, [pk], many=False)
    return template.bind(bound)


def _compiled_settling(question: Question[Any], expected: Values, values: Values) -> Any:
    keys, meta = Keys(question.model, many=False), question.model._meta
    places = {name: Placeholder(meta.get_field(name)) for name in expected}
    try:
        assigned = Assigned(question.model, values)
        rows = question.table.filter(keys.condition, **places)
        sql, params = update_sql(rows, assigned.columns)
        needed = [keys.placeholder, *places.values(), *assigned.placeholders]
        template = Template(sql, params, needed)
    except (CannotCompile, AttributeError, TypeError, ValueError):
        return None
    return keys.placeholder, places, assigned, template, values


class _Stored(Expression):
    """A column of the model's own table as it is stored, even if its field changes its SELECT."""

    def __init__(self, column: str) -> None:
        super().__init__(output_field=IntegerField())
        self._column = column

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        quote = connection.ops.quote_name
        return f"{quote(compiler.query.base_table)}.{quote(self._column)}", []


class Marking:
    """Lock rows, check them, write a mark and return them, in one statement.

    ``bare``: the rows are locked and checked already. Each answer has the columns that the question
    selects, followed by the row's key, the old values of the marked columns, and their new values.
    """

    def __init__(
        self, question: Question[Any], wanted: Wanted, mark: Values, *, bare: bool = False
    ) -> None:
        self._names = [*mark]
        many = len(wanted.pks) > 1
        name = "mark", bare, _choice(wanted), many, shape(mark)
        if name not in question.cache:
            question.cache[name] = self._compiled(question, wanted, mark, bare=bare, many=many)
        self.rows, self._columns, keys, assigned, template, _ = question.cache[name]
        connection = _connection(question)
        bound = assigned.bound(mark, connection)
        bound[keys] = bound_keys(question.model, question.using, wanted.pks, many=many)
        self.statement = template.bind(bound)
        self._connection = connection

    def _compiled(
        self, question: Question[Any], wanted: Wanted, mark: Values, *, bare: bool, many: bool
    ) -> tuple[Any, ...]:
        keys, assigned = Keys(question.model, many=many), Assigned(question.model, mark)
        some = question.table.filter(keys.condition)
        asked = some if bare else question.queryset.filter(keys.condition)
        rows = Rows(asked.order_by(), question.using)
        meta, compiler = question.model._meta, asked.query.get_compiler(question.using)
        fields: list[Any] = [meta.get_field(name) for name in self._names]
        before = {f"dcl_before_{at}": _Stored(f.column) for at, f in enumerate(fields)}
        first = _first(asked, wanted, keys.order).annotate(**before).values_list("pk", *before)
        locking, locking_params = first.query.get_compiler(question.using).as_sql()
        update, update_params = update_sql(question.table, assigned.columns)
        quote = compiler.connection.ops.quote_name
        own, key = quote(meta.db_table), quote(meta.pk_fields[0].column)
        columns = [each.get_col(meta.db_table) for each in (meta.pk_fields[0], *fields, *fields)]
        after = [f"{own}.{quote(f.column)}" for f in fields]
        returned = [*rows.selected_sql, f"{own}.{key}", *(f"dcl_taken.{n}" for n in before), *after]
        # If it is not materialised, the planner may lock one set of rows and update another.
        sql = (
            f"WITH dcl_taken (taken, {', '.join(before)}) AS MATERIALIZED ({locking}{'' if bare else ' ' + LOCK}) "
            f"{update} FROM dcl_taken WHERE {own}.{key} = dcl_taken.taken "
            f"RETURNING {', '.join(returned)}"
        )
        params = [*locking_params, *update_params, *rows.selected_params]
        template = Template(sql, params, [keys.placeholder, *assigned.placeholders])
        converters = compiler.get_converters(columns)
        return rows, (compiler, converters), keys.placeholder, assigned, template, mark

    def marks(self, answers: Sequence[Any]) -> tuple[dict[Any, Values], dict[Any, Values]]:
        """Return the old and the new values of the marked columns, by the rows' keys."""
        before: dict[Any, Values] = {}
        after: dict[Any, Values] = {}
        width, (compiler, converters) = len(self.rows.selected), self._columns
        behind = [answer[width:] for answer in answers]
        if converters:
            behind = compiler.apply_converters(behind, converters)
        for pk, *columns in behind:
            number = len(self._names)
            before[pk] = dict(zip(self._names, columns[:number], strict=True))
            after[pk] = dict(zip(self._names, columns[number:], strict=True))
        return before, after
