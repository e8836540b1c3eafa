"""Claim and mark in one statement and one round trip, where the database can.

PostgreSQL's ``UPDATE`` takes rows from a common table expression that locks them, and returns
what it wrote. Only an own-table question may be asked this way: its second check is the lock's
own look at the locked row's newest version. Whatever spans tables would be asked of the
statement's old snapshot, and is locked, asked again and written in three statements instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Field, Model, Q, prefetch_related_objects, sql

from dcl_processor.candidates.pending import Question, listed
from dcl_processor.locking.choosing import Choice
from dcl_processor.locking.claiming import Claimed, Miss
from dcl_processor.statements.kept import names
from dcl_processor.statements.keys import Keys, Rows
from dcl_processor.statements.places import Open, Template, open_values, prepared_values, written
from dcl_processor.statements.update import compiled

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
    question, values = batch.question, mark.values
    # A mistake must not cost the transaction that Django's TestCase has open.
    inside = connections[question.using].in_atomic_block
    with transaction.atomic(using=question.using) if inside else nullcontext():
        choice = Choice.among(batch.pks, batch.most)
        statement, answers = _asked(question, values, batch.pks, choice)
    marked, columns = len(values), statement.columns
    before: dict[Any, Values] = {}
    after: dict[Any, Values] = {}
    for pk, *answer in answers:
        before[pk] = dict(zip(values, answer[:marked], strict=True))
        now = dict(zip(columns, answer[marked:], strict=True))
        after[pk] = {name: now[name] for name in values}
    try:
        said = {pk: answer[marked:] for pk, *answer in answers}
        batch.claimed(_instances(batch, statement, said))
    except BaseException:
        # Committed already: what cannot be handed to the handler is put back.
        _put_back(question, before, after)
        raise
    mark.carried(before, after)


def _asked(
    question: Question[Any], values: Values, pks: Sequence[Any], choice: Choice | None
) -> tuple[_Statement, list[Any]]:
    """Execute the statement that fits; return it, and its answers."""
    many = len(pks) > 1
    make = partial(_Statement, question, values, many=many, choice=choice)
    statement = question.statements.get(("claim and mark", many, choice, names(values)), make)
    answers = statement.ask(pks, values) if statement is not None else None
    if statement is None or answers is None:
        statement = _Statement(question, values, rows=listed(pks), choice=choice)
        answers = statement.ask(pks, values)
    return statement, answers or []


class _Statement:
    """The statement for the rows named, or with open keys and open values for any."""

    def __init__(
        self,
        question: Question[Any],
        values: Values,
        *,
        rows: Rows | None = None,
        many: bool = False,
        choice: Choice | None = None,
    ) -> None:
        self._question = question
        self._values = values  # whose expressions are told apart by where they are in memory
        self._keys: Keys | None = None
        self._open: dict[str, Open] = {}
        if rows is None:
            self._keys = Keys(question.model, question.using, many=many)
            self._open = open_values(question.model, values)
            rows = self._keys.rows
        loaded = _loaded(question)
        fields = _returned(question, {*loaded, *values})
        self.columns = [field.attname for field in fields]
        # What the user's queryset left out stays out: of the mark's columns, too.
        self.places = [place for place, name in enumerate(self.columns) if name in loaded]
        self.loaded = [self.columns[place] for place in self.places]
        marks = {**values, **written(self._open)}
        statement, params = _compile(question, marks, fields, rows, choice)
        places = [self._keys.place] if self._keys else []
        self._template = Template(statement, params, [*places, *self._open.values()])
        meta = question.model._meta
        marked: list[Any] = [meta.get_field(name) for name in values]
        asked: list[Any] = [meta.pk_fields[0], *marked, *fields]
        self._compiler: Any = question.queryset.query.get_compiler(question.using)
        self._converters = self._compiler.get_converters(
            [field.get_col(meta.db_table) for field in asked]
        )

    def ask(self, pks: Sequence[Any], values: Values) -> list[Any] | None:
        """Execute it; return each row's key, what the mark's columns said, and its columns.

        ``None``: nothing was sent, since a field makes SQL of its value.
        """
        connection = connections[self._question.using]
        filled = prepared_values(self._open, values, connection)
        if any(hasattr(value, "as_sql") for value in filled.values()):
            return None
        if self._keys is not None:
            filled.update(self._keys.filled(pks))
        with connection.cursor() as cursor:
            cursor.execute(self._template.sql, self._template.filled(filled))
            answers = cursor.fetchall()
        return list(self._compiler.apply_converters(answers, self._converters))


def _compile(
    question: Question[Any],
    values: Values,
    fields: Sequence[Field[Any, Any]],
    rows: Rows,
    choice: Choice | None,
) -> tuple[str, list[Any]]:
    connection = connections[question.using]
    quote = connection.ops.quote_name
    table = quote(question.model._meta.db_table)
    [primary_key] = question.model._meta.pk_fields
    key = quote(str(primary_key.column))
    # Second check: another copy may have finished a row since its key was read.
    asked = question.narrowed(rows.condition).values_list("pk", *values)
    if choice is not None:
        asked = choice.first(asked, rows)
    select, params = asked.query.get_compiler(question.using).as_sql()
    lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
    update, more = _update(question, values)
    before = [f"before_{place}" for place, _ in enumerate(values)]
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


def _update(question: Question[Any], values: Values) -> tuple[str, Sequence[Any]]:
    table = question.table
    query: Any = table.query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    return compiled(query.get_compiler(question.using))


def _returned(question: Question[Any], names: Collection[str]) -> list[Field[Any, Any]]:
    fields = question.model._meta.concrete_fields
    return [field for field in fields if field.attname in names]


def _loaded(question: Question[Any]) -> set[str]:
    """Return the columns that the handler's instance is to carry."""
    names, deferred = question.queryset.query.deferred_loading
    return {
        field.attname
        for field in question.model._meta.concrete_fields
        if field.primary_key or (field.name in names or field.attname in names) != deferred
    }


def _instances(
    batch: Batch[Any], statement: _Statement, answers: Mapping[Any, Sequence[Any]]
) -> Claimed[Any]:
    queryset: Any = batch.question.queryset
    model: type[Model] = queryset.model  # which may be a proxy
    using = batch.question.using
    names, places = statement.loaded, statement.places
    found = {
        pk: model.from_db(using, names, [values[place] for place in places])
        for pk, values in answers.items()
    }
    rows = {pk: found[pk] for pk in batch.pks if pk in found}
    prefetch_related_objects(list(rows.values()), *queryset._prefetch_related_lookups)  # noqa: SLF001  # no public name
    choice = Choice.among(batch.pks, batch.most)
    reached = choice.reached(batch.pks, found) if choice else batch.pks
    passed = [pk for pk in reached if pk not in found]
    return Claimed(rows, dict.fromkeys(passed, Miss.ABSENT))


def _put_back(
    question: Question[Any], before: Mapping[Any, Values], after: Mapping[Any, Values]
) -> None:
    table = question.table
    for pk, values in before.items():
        table.filter(Q(**after[pk]), pk=pk).update(**values)
