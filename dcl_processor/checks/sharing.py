"""Checks of processors of one model: columns that each processor needs for itself.

If two processors count attempts in one column, they use up each other's attempts, and a processor
that never ran finds its rows postponed. Processors for which no row is pending at the same time may
share these columns, as the stages of a pipeline do: a success clears them for the next stage. This
is known if the ``pending`` of both compares one column with different constants. A claimed row is
recognised by the values of ``claim`` alone, so these must differ in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist
from django.db.models.expressions import Col
from django.db.models.lookups import Exact, In
from django.db.models.sql.where import AND, OR, WhereNode

from dcl_processor.candidates.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.values import constants_of

User = tuple[BatchProcessor[Any], Question[Any]]

#: A column, by its database, its table and its name: children share their parents' columns.
Column = tuple[str, str, str]


def check(users: Sequence[User]) -> Iterator[CheckMessage]:
    """Yield an error for every two processors that share what each needs for itself."""
    for one, other in combinations(users, 2):
        shared = [*_shared_claim(one, other)]
        if not _are_disjoint(one, other):
            theirs = _kept(*one)
            shared += [name for column, name in _kept(*other).items() if column in theirs]
            for flag in _flags(*one) & _flags(*other):
                yield checks.Warning(
                    f"expected {other[0].name} and {one[0].name} to handle different rows, got two "
                    f"processors that take rows out of pending by {flag[-1]} of "
                    f"{other[1].model._meta.label}: a row is handled by one of them alone.",
                    hint="Let each test and write a column of its own, or add a condition to "
                    "pending that tells their rows apart.",
                    obj=other[0].name,
                    id="dcl_processor.W011",
                )
        if shared:
            names = " and ".join(shared)
            yield checks.Error(
                f"expected {other[0].name} to write to columns of its own, got {names} of "
                f"{other[1].model._meta.label} shared with {one[0].name}: each processor would "
                "read the other's values as its own.",
                hint="Name other columns, such as Retry(attempts='…', next_attempt_at='…'), "
                "Lease(…, field='…') and claimed_at='…', or claim another value. If no row is "
                "ever pending for both, silence dcl_processor.E010.",
                obj=other[0].name,
                id="dcl_processor.E010",
            )


def _flags(processor: BatchProcessor[Any], question: Question[Any]) -> set[Column]:
    """Return the columns of which pending demands a constant, and done writes another one."""
    asked = _constants(question)
    written = {
        column: str(value).casefold()
        for name, value in constants_of(processor.done or {}).items()
        if (column := _column(question, name)) is not None
    }
    return {column for column in asked.keys() & written if written[column] not in asked[column]}


def _kept(processor: BatchProcessor[Any], question: Question[Any]) -> Mapping[Column, str]:
    """Return the columns that keep when a row may be tried, and which worker has it."""
    retry, lease = processor.retry, processor.lease
    names = [
        *(filter(None, (retry.attempts, retry.next_attempt_at)) if retry else ()),
        *((lease.field,) if lease else ()),
        *((processor.claimed_at,) if processor.claimed_at else ()),
    ]
    columns = {name: _column(question, name) for name in names}
    return {column: name for name, column in columns.items() if column is not None}


def _shared_claim(one: User, other: User) -> Iterator[str]:
    """Yield the claim by which a row of one processor is taken for a row of the other."""
    if one[0].lease and other[0].lease:
        return  # a row on a lease is recognised by the lease
    claims = [_claim(*one), _claim(*other)]
    if all(claims) and (claims[0] <= claims[1] or claims[1] <= claims[0]):
        yield f"claim={dict(other[0].claim or {})!r}"


def _claim(
    processor: BatchProcessor[Any], question: Question[Any]
) -> set[tuple[Column | None, str]]:
    """Return the constants by which a claimed row is recognised."""
    return {
        (_column(question, name), repr(value))
        for name, value in constants_of(processor.claim or {}).items()
    }


def _column(question: Question[Any], name: str) -> Column | None:
    try:
        field: Any = question.model._meta.get_field(name)
    except FieldDoesNotExist:
        return None  # which another check reports
    return (question.using, field.model._meta.db_table, field.column)


def _are_disjoint(one: User, other: User) -> bool:
    """Return whether it is known that no row is pending for both."""
    asked, asked_too = _constants(one[1]), _constants(other[1])
    return any(not asked[column] & asked_too[column] for column in asked.keys() & asked_too.keys())


def _constants(question: Question[Any]) -> dict[Column, set[str]]:
    """Return the columns in which every pending row has one of a set of constants."""
    query = question.unfiltered.query
    return _demanded(question, query.where, query.base_table)


def _demanded(question: Question[Any], node: Any, table: str | None) -> dict[Column, set[str]]:
    """Return the same for the rows that meet one condition."""
    if not isinstance(node, WhereNode):
        column, values = getattr(node, "lhs", None), _values(node)
        if values is None or not isinstance(column, Col) or column.alias != table:
            return {}
        target: Any = column.target
        return {(question.using, target.model._meta.db_table, target.column): values}
    if node.negated or node.connector not in {AND, OR}:
        return {}
    each = [_demanded(question, child, table) for child in node.children]
    columns = {column for found in each for column in found}
    if node.connector == AND:
        return {c: set.intersection(*(some[c] for some in each if c in some)) for c in columns}
    # Of several alternatives, only a column that all of them compare is known.
    in_all = {column for column in columns if all(column in some for some in each)}
    return {column: set.union(*(some[column] for some in each)) for column in in_all}


def _values(lookup: Any) -> set[str] | None:
    match lookup:
        case Exact():
            values = [lookup.rhs]
        case In(rhs=list() | tuple() | set() | frozenset()):
            values = list(lookup.rhs)
        case _:
            return None
    if any(hasattr(value, "resolve_expression") or hasattr(value, "query") for value in values):
        return None
    # A case-insensitive column matches the same rows in upper and lower case.
    return {str(value).casefold() for value in values}
