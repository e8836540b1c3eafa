"""Claim and mark in one statement and one round trip, where the database can.

PostgreSQL's ``UPDATE`` takes rows from a common table expression that locks them, and returns
what it wrote. Only an own-table question may be asked this way: its second check is the lock's
own look at the locked row's newest version. Whatever spans tables would be asked of the
statement's old snapshot, and is locked, asked again and written in three statements instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Field, Model, Q, QuerySet, prefetch_related_objects, sql

from .locking import Claimed, Miss
from .pending import Question

if TYPE_CHECKING:
    from .batch import Batch
    from .marks import Mark, Values

#: The name of the common table expression.
_TAKEN = "dcl_taken"


def suits(question: Question[Any]) -> bool:
    """Tell whether the database can do it, and this question may be asked so."""
    features = connections[question.using].features
    # No database without NO KEY has an UPDATE … FROM a locking SELECT that returns its rows.
    able = features.has_select_for_no_key_update and features.has_select_for_update_skip_locked
    return bool(able and question.own_table and len(question.model._meta.pk_fields) == 1)


def claim_and_mark(batch: Batch[Any], mark: Mark) -> None:
    """Claim the batch's rows and mark them; each statement commits itself."""
    question = batch.question
    fields = _loaded(question, mark)
    statement, params = _statement(batch, mark, fields)
    # A mistake must not cost the transaction that Django's TestCase has open.
    inside = connections[question.using].in_atomic_block
    if inside:
        with transaction.atomic(using=question.using):
            answers = _ask(question, statement, params, fields, mark)
    else:
        answers = _ask(question, statement, params, fields, mark)
    marked, names = len(mark.values), list(mark.values)
    columns = [field.attname for field in fields]
    before: dict[Any, Values] = {}
    after: dict[Any, Values] = {}
    for pk, *answer in answers:
        before[pk] = dict(zip(names, answer[:marked], strict=True))
        said = dict(zip(columns, answer[marked:], strict=True))
        after[pk] = {name: said[name] for name in names}
    try:
        batch.claimed(
            _instances(batch, columns, [(pk, answer[marked:]) for pk, *answer in answers])
        )
    except BaseException:
        # Committed already: what cannot be handed to the handler is put back.
        _put_back(question, before, after)
        raise
    mark.carried(before, after)


def _statement(
    batch: Batch[Any], mark: Mark, fields: Sequence[Field[Any, Any]]
) -> tuple[str, list[Any]]:
    question = batch.question
    connection = connections[question.using]
    quote = connection.ops.quote_name
    table = quote(question.model._meta.db_table)
    [primary_key] = question.model._meta.pk_fields
    key = quote(str(primary_key.column))
    # Second check: another copy may have finished a row since its key was read.
    asked = question.among(batch.pks).values_list("pk", *mark.values)
    select, params = asked.query.get_compiler(question.using).as_sql()
    lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
    update, more = _update(question, mark)
    before = [f"before_{place}" for place, _ in enumerate(mark.values)]
    returned = [
        f"{table}.{key}",
        *(f"{_TAKEN}.{name}" for name in before),
        *(f"{table}.{quote(str(field.column))}" for field in fields),
    ]
    # Materialised, or the planner may lock one set of rows and update another.
    statement = (
        f"WITH {_TAKEN} (taken, {', '.join(before)}) AS MATERIALIZED ({select} {lock}) "
        f"{update} FROM {_TAKEN} WHERE {table}.{key} = {_TAKEN}.taken "
        f"RETURNING {', '.join(returned)}"
    )
    return statement, [*params, *more]


def _update(question: Question[Any], mark: Mark) -> tuple[str, Sequence[Any]]:
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    query: Any = table.query.chain(sql.UpdateQuery)
    query.add_update_values(mark.values)
    compiled: tuple[str, Sequence[Any]] = query.get_compiler(question.using).as_sql()
    return compiled


def _ask(
    question: Question[Any],
    statement: str,
    params: Sequence[Any],
    fields: Sequence[Field[Any, Any]],
    mark: Mark,
) -> list[Any]:
    meta = question.model._meta
    marked: list[Any] = [meta.get_field(name) for name in mark.values]
    asked: list[Any] = [meta.pk_fields[0], *marked, *fields]
    with connections[question.using].cursor() as cursor:
        cursor.execute(statement, params)
        answers = cursor.fetchall()
    compiler = question.queryset.query.get_compiler(question.using)
    converters = compiler.get_converters([field.get_col(meta.db_table) for field in asked])
    return list(compiler.apply_converters(answers, converters))


def _loaded(question: Question[Any], mark: Mark) -> list[Field[Any, Any]]:
    """Return the columns that the handler's instance is to carry, those of the mark included."""
    names, deferred = question.queryset.query.deferred_loading
    return [
        field
        for field in question.model._meta.concrete_fields
        if field.primary_key
        or field.attname in mark.values
        or (field.name in names or field.attname in names) != deferred
    ]


def _instances(
    batch: Batch[Any], columns: Sequence[str], answers: Sequence[tuple[Any, Sequence[Any]]]
) -> Claimed[Any]:
    queryset: Any = batch.question.queryset
    model: type[Model] = queryset.model  # which may be a proxy
    using = batch.question.using
    found = {pk: model.from_db(using, columns, values) for pk, values in answers}
    rows = {pk: found[pk] for pk in batch.pks if pk in found}
    prefetch_related_objects(list(rows.values()), *queryset._prefetch_related_lookups)  # noqa: SLF001  # no public name
    return Claimed(rows, {pk: Miss.ABSENT for pk in batch.pks if pk not in found})


def _put_back(
    question: Question[Any], before: Mapping[Any, Values], after: Mapping[Any, Values]
) -> None:
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    for pk, values in before.items():
        table.filter(Q(**after[pk]), pk=pk).update(**values)
