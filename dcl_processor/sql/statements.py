"""The statements of the steps on PostgreSQL: claims, and the one that writes to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import DataError, Error, connections
from django.db.models import CharField, IntegerField, Q, QuerySet

from dcl_processor.pending.question import Question, fenced_by
from dcl_processor.report.exceptions import TransactionLost
from dcl_processor.report.values import Values, resolve
from dcl_processor.sql.compiled import (
    Assigned,
    Build,
    CannotCompile,
    Keys,
    Placeholder,
    Rows,
    Statement,
    Template,
    bound_keys,
    condition_sql,
    select,
    shape,
    update_sql,
)
from dcl_processor.sql.errors import NO_TRANSACTION, code_of
from dcl_processor.sql.steps import Wanted, Write, not_left_pending, not_written

XID = "pg_current_xact_id()"
LOCK = "FOR NO KEY UPDATE SKIP LOCKED"

#: The texts of the error with which a statement that writes fails. The transaction is not the one
#: that has the locks; a row is still pending; the wrong number of rows was written.
LOST, STILL, FEWER = "dcl_lost:", "dcl_still:", "dcl_fewer:"

#: invalid_savepoint_specification, or no transaction.
_NO_SAVEPOINT = frozenset({"3B001", NO_TRANSACTION})


def meaning(error: Error, label: str, pks: Sequence[Any]) -> Exception | None:
    """Return what the error of a statement that writes to these rows means, or ``None``: itself."""
    text = str(error) if isinstance(error, DataError) else ""
    if LOST in text or code_of(error) in _NO_SAVEPOINT:
        return TransactionLost()
    if STILL in text:
        quoted = text.partition(STILL)[2]
        still = [pk for pk in pks if quoted.startswith(f'{pk}"')]
        return not_left_pending(label, (still or [*pks])[0])
    return not_written(label, pks) if FEWER in text else None


def first_of(queryset: QuerySet[Any, Any], wanted: Wanted, order: Any) -> QuerySet[Any, Any]:
    """Limit a queryset to the first of the wanted rows, if more are named."""
    if wanted.choice is None:
        return queryset.order_by()
    ordered = queryset.order_by(order)
    ordered.query.standard_ordering = True  # order_by() does not undo a reverse()
    return ordered[: wanted.choice]


def locked_question(question: Question[Any], wanted: Wanted) -> tuple[Statement, Build]:
    """Return the statement that locks the rows and checks them."""

    def narrow(condition: Q, order: Any) -> QuerySet[Any, Any]:
        return first_of(question.queryset.filter(condition), wanted, order)

    return select(question, ("claim", wanted.choice), wanted.pks, narrow, change=_locking)


def locked_rows(question: Question[Any], pks: Sequence[Any]) -> tuple[Statement, Build]:
    """Return the statement that locks the rows by their keys."""

    # Race: lock on joined rows. The statement joins no table.
    def narrow(condition: Q, _: Any) -> QuerySet[Any, Any]:
        return question.table.filter(condition).order_by().values_list("pk")

    return select(question, "lock", pks, narrow, change=_locking)


def asked_of_keys(question: Question[Any]) -> tuple[Statement, Build]:
    """Return the statement that asks the whole question of the rows that the claim has locked."""
    if "keyed" not in question.cache:
        rows = Rows(question.keyed(()), question.using)
        question.cache["keyed"] = Statement(rows.sql, rows.params), rows.build
    found: tuple[Statement, Build] = question.cache["keyed"]
    return found


def asked_again(question: Question[Any], pks: Sequence[Any]) -> tuple[Statement, Build]:
    """Return the statement that asks the whole question for these rows."""

    def narrow(condition: Q, _: Any) -> QuerySet[Any, Any]:
        return question.queryset.filter(condition).order_by()

    return select(question, "ask", pks, narrow)


def _locking(question: Question[Any], sql: str) -> str:
    own = f'"{question.model._meta.db_table}"'.replace('""', '"')
    # The id of the transaction is no annotation: that would be an attribute of the instances.
    return f"{sql.replace(f' FROM {own}', f', {XID} FROM {own}', 1)} {LOCK}"


# --- whether rows are still pending


def fence(xid: str) -> Statement:
    """Return the statement that fails in another transaction than the one with this id."""
    return Statement(
        f"SELECT CAST(CASE WHEN {XID} = %s::xid8 THEN '0' ELSE '{LOST}' END AS integer)", [xid]
    )


def still_asked(question: Question[Any], pks: Sequence[Any], *, due: bool = False) -> Statement:
    """Return the statement that fails if one of the rows is still pending; ``due``: and due."""
    asked = question.queryset if due else question.unfiltered

    def narrow(condition: Q, _: Any) -> QuerySet[Any, Any]:
        return asked.filter(condition).order_by().values_list("pk")

    def change(_: Question[Any], sql: str) -> str:
        return (
            f"SELECT CAST(CASE WHEN count(*) = 0 THEN '0' ELSE '{STILL}' || min(pk::text) END "  # noqa: S608
            f"AS integer) FROM ({sql}) AS dcl_rows (pk)"
        )

    return select(question, ("still", due), pks, narrow, change=change)[0]


def own_key(question: Question[Any]) -> str:
    quote = connections[question.using].ops.quote_name
    meta = question.model._meta
    return f"{quote(meta.db_table)}.{quote(str(meta.pk_fields[0].column))}"


def still_pending(question: Question[Any], rows: QuerySet[Any, Any]) -> tuple[str, list[Any]]:
    """Return the SQL of a written row's key if it is still among these, or else of NULL."""
    try:
        sql, params = condition_sql(rows)
    except EmptyResultSet:
        return "NULL", []
    return f"CASE WHEN {sql} THEN {own_key(question)}::text END", [*params]


def failing(still: str) -> str:
    """Return the SQL that fails for a row that is still pending."""
    return f"CAST(COALESCE('{STILL}' || {still}, '0') AS integer)"


# --- the one statement that writes


def writing(question: Question[Any], write: Write, xid: str | None) -> Statement:
    """Return the statement that writes to rows, and fails as a whole if one of them is wrong.

    With the id of a transaction it fails in any other one, or if it writes fewer rows than there
    are. Without one it writes to the rows that have this worker's mark and that no other session
    has locked, and returns their keys.
    """
    many, connection = len(write.pks) > 1, connections[question.using]
    try:
        fence = _recognised(write) if xid is None else {"xid": xid}
        name = "write", many, write.asks, xid is None, (*fence,), shape(write.values)
        if name not in question.cache:
            question.cache[name] = _compiled(question, write, fence, xid, many=many)
        keys, number, fenced, assigned, template, _ = question.cache[name]
        bound = assigned.bound(write.values, connection)
        bound[keys] = bound_keys(question.model, question.using, write.pks, many=many)
        bound[number] = len(write.pks)
        bound |= {
            place: place.output_field.get_db_prep_value(fence[column], connection)
            for column, place in fenced.items()
        }
        statement: Statement = template.bind(bound)
    except (CannotCompile, AttributeError, TypeError, ValueError):
        # A field of the user's own fails on a placeholder; or a value is wrong, which comes again.
        expected = fenced_by(write.expected) if xid is None else xid
        rows, values = Q(pk__in=[*write.pks]), resolve(write.values)
        return Statement(*_write_sql(question, write, rows, values, expected))
    return statement


def _recognised(write: Write) -> Values:
    """Return the columns by which a row is recognised, if each has one value."""
    some = {name: v if isinstance(v, list) else [v] for name, v in write.expected.items()}
    if any(len(each) != 1 or each[0] is None for each in some.values()):
        raise CannotCompile
    return {name: each[0] for name, each in some.items()}


def _compiled(
    question: Question[Any], write: Write, fence: Values, xid: str | None, *, many: bool
) -> tuple[Any, ...]:
    meta = question.model._meta
    keys, assigned = Keys(question.model, many=many), Assigned(question.model, write.values)
    number = Placeholder(IntegerField())
    fenced = {name: Placeholder(CharField() if xid else meta.get_field(name)) for name in fence}
    sql, params = _write_sql(
        question,
        write,
        keys.condition,
        assigned.columns,
        fenced["xid"] if xid else Q(**fenced),
        number=number,
    )
    needed = [keys.placeholder, *fenced.values(), *assigned.places.values()]
    # The values are kept, so that the identity of an expression in the name stays its own.
    return keys.placeholder, number, fenced, assigned, Template(sql, params, needed), write.values


def _write_sql(
    question: Question[Any],
    write: Write,
    rows: Q,
    columns: Values,
    expected: Any,
    *,
    number: Any = 0,
) -> tuple[str, list[Any]]:
    update, params = update_sql(question.table, columns)
    still, asked = "NULL", list[Any]()
    if write.asks and question.asks_own_row:
        still, asked = still_pending(question, question.unfiltered)
    key = own_key(question)
    if isinstance(expected, Q):
        # Race: lost lease that writes. The lock waits for no other session, and no row is written
        # that has another mark.
        mine = question.table.filter(rows, expected).order_by().values_list("pk")
        locked, locked_params = mine.query.sql_with_params()
        sql = (
            f"WITH dcl_mine (pk) AS MATERIALIZED ({locked} {LOCK}) {update} FROM dcl_mine "
            f"WHERE {key} = dcl_mine.pk RETURNING {key}, {failing(still)}"
        )
        return sql, [*locked_params, *params, *asked]
    # Race: flip without work. The COMMIT is in the same message, and only an error skips it. The
    # cast is that error. It depends on the count, and so is not evaluated before it.
    where, where_params = condition_sql(question.table.filter(rows))
    there, keys = question.table.filter(rows).order_by().values_list("pk").query.sql_with_params()
    sql = (
        f"WITH dcl_flipped (still) AS ({update} WHERE {where} AND {XID} = %s "  # noqa: S608
        f"RETURNING {still}) "
        f"SELECT CAST(CASE WHEN count(still) > 0 THEN '{STILL}' || min(still) "
        f"WHEN count(*) = %s THEN '0' "
        f"WHEN NOT {XID} = %s::xid8 THEN '{LOST}' "
        f"WHEN count(*) = (SELECT count(*) FROM ({there}) AS dcl_there) "
        f"THEN '0' ELSE '{FEWER}' END AS integer) FROM dcl_flipped"
    )
    counted = [number or len(write.pks), expected]
    return sql, [*params, *where_params, expected, *asked, *counted, *keys]
