"""Claim and mark in one statement and one round trip, if the database supports it.

PostgreSQL's ``UPDATE`` takes rows from a common table expression that locks them, and returns
what it wrote. Only an own-table question allows this, because PostgreSQL checks it again on the
newest version of each locked row. A question that spans tables would be checked on the statement's
old snapshot, so three statements lock the rows, check them again and write them instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import NotSupportedError, connections, transaction
from django.db.models import Expression, IntegerField, Model, Q, QuerySet, sql

from dcl_processor.candidates.pending import Question, listed
from dcl_processor.clock import recognisable
from dcl_processor.locking.claiming import Claimed, Miss
from dcl_processor.locking.wanted import Wanted
from dcl_processor.statements.keys import Keys, Rows
from dcl_processor.statements.places import Open, Template, open_values, written
from dcl_processor.statements.selection import Evaluation
from dcl_processor.statements.update import compiled

if TYPE_CHECKING:
    from dcl_processor.values import Values

    from .batch import Batch
    from .marks import Mark

#: Tables, by alias and model, for which the database refuses such a statement because a rule turns
#: it into several. Only sending a statement shows this.
refused: set[tuple[str, type[Model]]] = set()

#: The name of the common table expression.
_TAKEN = "dcl_taken"


def suits(question: Question[Any]) -> bool:
    """Return whether the database supports such a statement, and the question allows it."""
    if (question.using, question.model) in refused:
        return False
    features = connections[question.using].features
    # Only a database with NO KEY has an UPDATE … FROM a locking SELECT that returns its rows.
    able = features.has_select_for_no_key_update and features.has_select_for_update_skip_locked
    return bool(able and question.own_table and len(question.model._meta.pk_fields) == 1)


def claim_and_mark(
    batch: Batch[Any], mark: Mark
) -> tuple[dict[Any, Values], dict[Any, Values]] | None:
    """Claim the batch's rows and mark them, with one commit for each statement.

    Returns the old and the new values of the claimed rows' marked columns; ``None`` if nothing was
    done because the table is in ``refused``.
    """
    question, wanted = batch.question, batch.wanted
    # An error must not break the transaction that Django's TestCase keeps open.
    inside = connections[question.using].in_atomic_block
    try:
        with transaction.atomic(using=question.using) if inside else nullcontext():
            statement, answers = _asked(question, mark, wanted)
    except NotSupportedError:
        refused.add((question.using, question.model))
        return None
    before, after = statement.marks(answers)
    found: dict[Any, Any] = {}
    try:
        found = {row.pk: row for row in statement.instances(answers)}
    finally:
        # The claim is committed, so rows that cannot be passed to the handler are put back.
        _put_back(question, before, after, after.keys() - found.keys())
    rows = {pk: found[pk] for pk in wanted.pks if pk in found}
    missed = [pk for pk in wanted.reached(found) if pk not in found]
    batch.take(Claimed(rows, dict.fromkeys(missed, Miss.ABSENT)))
    return before, {pk: after[pk] for pk in rows}


def _asked(question: Question[Any], mark: Mark, wanted: Wanted) -> tuple[_Statement, Sequence[Any]]:
    """Execute the statement that fits; return it, and its answers."""
    pks, values = wanted.pks, mark.values
    many = len(pks) > 1
    make = partial(_Statement, question, values, wanted, many=many)
    statement = question.statements.get(("claim and mark", many, wanted.choice, mark.name), make)
    answers = statement.ask(pks, values) if statement is not None else None
    if statement is None or answers is None:
        statement = _Statement(question, values, wanted, rows=listed(pks))
        answers = statement.ask(pks, values)
    return statement, answers or []


class _Statement:
    """The statement for the rows named, or for any rows if its keys and values are open.

    Each answer has the columns that the user's queryset selects, followed by the row's key, the
    old values of the marked columns, and their new values.
    """

    def __init__(
        self,
        question: Question[Any],
        values: Values,
        wanted: Wanted,
        *,
        rows: Rows | None = None,
        many: bool = False,
    ) -> None:
        self._connection: Any = connections[question.using]
        self._values = values
        self._keys: Keys | None = None
        self._open: dict[str, Open] = {}
        if rows is None:
            self._keys = Keys(question.model, question.using, many=many)
            self._open = open_values(question.model, values)
            rows = self._keys.rows
        asked = question.narrowed(rows.condition)
        self._evaluation = Evaluation(asked, question.using)
        marks = {**values, **written(self._open)}
        parts = [
            _taken(question, wanted.first(asked, rows), values),
            _update(question, marks),
            self._returning(question),
        ]
        self._template = Template(
            " ".join(statement for statement, _ in parts),
            [each for _, params in parts for each in params],
            [*([self._keys.place] if self._keys else []), *self._open.values()],
        )

    def ask(self, pks: Sequence[Any], values: Values) -> Sequence[Any] | None:
        """Execute the statement, and return its answers.

        ``None``: nothing was sent, because a field turns its value into SQL.
        """
        connection = self._connection
        filled: dict[Open, Any] = {
            place: place.prepared(values[name], connection) for name, place in self._open.items()
        }
        if any(hasattr(value, "as_sql") for value in filled.values()):
            return None
        if self._keys is not None:
            filled.update(self._keys.filled(pks))
        with connection.cursor() as cursor:
            cursor.execute(self._template.sql, self._template.filled(filled))
            answers: Sequence[Any] = cursor.fetchall()
        return answers

    def marks(self, answers: Sequence[Any]) -> tuple[dict[Any, Values], dict[Any, Values]]:
        """Return the old and the new values of the marked columns, by the rows' keys."""
        before: dict[Any, Values] = {}
        after: dict[Any, Values] = {}
        behind = [answer[self._selected :] for answer in answers]
        if self._converters:
            behind = self._compiler.apply_converters(behind, self._converters)
        for pk, *columns in behind:
            before[pk] = dict(zip(self._values, columns, strict=False))
            after[pk] = dict(zip(self._values, columns[len(self._values) :], strict=True))
        return before, after

    def instances(self, answers: Sequence[Any]) -> list[Any]:
        """Return the rows as the user's queryset makes them."""
        return self._evaluation.of(answers)

    def _returning(self, question: Question[Any]) -> tuple[str, list[Any]]:
        self._compiler: Any = question.queryset.query.get_compiler(question.using)
        meta = question.model._meta
        marked = [meta.get_field(name) for name in self._values]
        columns = [each.get_col(meta.db_table) for each in (meta.pk_fields[0], *marked, *marked)]
        self._converters = self._compiler.get_converters(columns)
        selected = [part for _, part, _ in self._evaluation.compiler.select]
        self._selected = len(selected)
        stored = [self._compiler.compile(column) for column in columns]
        # The first column is the key; old values come from the expression that locked the rows.
        stored[1 : 1 + len(marked)] = [(f"{_TAKEN}.{name}", ()) for name in _before(self._values)]
        behind = [
            column.select_format(self._compiler, statement, params)
            for column, (statement, params) in zip(columns, stored, strict=True)
        ]
        parts = [*selected, *behind]
        returned = ", ".join(statement for statement, _ in parts)
        return f"RETURNING {returned}", [each for _, params in parts for each in params]


class _Stored(Expression):
    """A column of the model's own table as it is stored, even if its field changes its SELECT."""

    def __init__(self, column: str) -> None:
        super().__init__(output_field=IntegerField())
        self._column = column

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        quote = connection.ops.quote_name
        return f"{quote(compiler.query.base_table)}.{quote(self._column)}", []


def _before(names: Collection[str]) -> Iterator[str]:
    return (f"dcl_before_{place}" for place, _ in enumerate(names))


def _taken(
    question: Question[Any], asked: QuerySet[Any, Any], values: Values
) -> tuple[str, Sequence[Any]]:
    """Return the common table expression that locks the rows, and keeps their old values."""
    meta = question.model._meta
    columns = [str(meta.get_field(name).column) for name in values]
    stored = dict(zip(_before(values), map(_Stored, columns), strict=True))
    connection = connections[question.using]
    # Race: double claim. Another worker may have finished a row since its key was read.
    found = asked.annotate(**stored).values_list("pk", *stored)
    select, params = found.query.get_compiler(question.using).as_sql()
    lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
    # If it is not materialised, the planner may lock one set of rows and update another.
    return (
        f"WITH {_TAKEN} (taken, {', '.join(stored)}) AS MATERIALIZED ({select} {lock})",
        params,
    )


def _update(question: Question[Any], values: Values) -> tuple[str, Sequence[Any]]:
    query: Any = question.table.query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    statement, params = compiled(query.get_compiler(question.using))
    quote = connections[question.using].ops.quote_name
    table = quote(question.model._meta.db_table)
    key = quote(str(question.model._meta.pk_fields[0].column))
    return f"{statement} FROM {_TAKEN} WHERE {table}.{key} = {_TAKEN}.taken", params


def _put_back(
    question: Question[Any],
    before: Mapping[Any, Values],
    after: Mapping[Any, Values],
    pks: Collection[Any],
) -> None:
    for pk in pks:
        table = question.table
        ours, back = _recognisable(question, after[pk]), _recognisable(question, before[pk])
        table.filter(Q(**ours), pk=pk).update(**back)


def _recognisable(question: Question[Any], values: Values) -> Values:
    return {name: recognisable(value, question.using) for name, value in values.items()}
