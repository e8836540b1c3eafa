"""Checks of a ``claim`` beside a lease: a marked row has to stay in ``pending``.

The conditions are evaluated for a row with the mark, as far as they read only the columns that it
writes. Each result is true, false, or ``None`` for what depends on other columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Model
from django.db.models.expressions import Col
from django.db.models.lookups import Exact, In, IsNull, Lookup
from django.db.models.sql.where import AND, OR, WhereNode

from dcl_processor.candidates.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.settlement.rehearsal import marked_form
from dcl_processor.values import constants_of, is_constant

#: Stands for the value of a column that is not NULL, and not known.
_SET = object()

#: The types whose values are compared as they are; other types may have several spellings.
_PLAIN = (str, int)

Marked = Mapping[str, Any]


def check(processor: BatchProcessor[Any], question: Question[Any]) -> Iterator[CheckMessage]:
    """Yield an error if no row with the mark can be pending."""
    if processor.claim is None or processor.lease is None:
        return
    query = question.unfiltered.query
    marked = _marked(processor, question.model)
    if _holds(query.where, query.base_table, marked) is False:
        yield checks.Error(
            f"expected claim={dict(processor.claim)!r} to leave a row in pending under its lease, "
            "got a pending that excludes such rows: no worker would take a row over from one that "
            "died.",
            hint=f"Add the mark to pending together with the lease: {marked_form(processor)}. "
            "Without the lease, rows that other code marks in the same way would be taken from it.",
            obj=processor.name,
            id="dcl_processor.E013",
        )


def _marked(processor: BatchProcessor[Any], model: type[Model]) -> Marked:
    """Return the columns of a marked row that are known, by ``attname``."""
    lease = processor.lease
    times = [processor.claimed_at, lease.field if lease else None]
    known = {name: _SET for name in times if name}
    known.update(constants_of(processor.claim or {}))
    found: dict[str, Any] = {}
    meta: Any = model._meta
    for name, value in known.items():
        try:
            found[meta.get_field(name).attname] = value
        except FieldDoesNotExist:
            continue  # which another check reports
    return found


def _holds(node: Any, table: str | None, marked: Marked) -> bool | None:
    """Return whether a condition holds for a marked row; ``None`` if that is not known."""
    if isinstance(node, WhereNode):
        held = [_holds(child, table, marked) for child in node.children]
        result = _joined(node.connector, held)
        return result if result is None or not node.negated else not result
    column = getattr(node, "lhs", None)
    if isinstance(node, Lookup) and isinstance(column, Col) and column.alias == table:
        target: Any = column.target
        if target.attname in marked:
            return _compared(node, target, marked[target.attname])
    return None


def _joined(connector: str, held: list[bool | None]) -> bool | None:
    if connector not in {AND, OR}:
        return None
    decisive = connector == OR
    if decisive in held:
        return decisive
    return None if None in held else not decisive


def _compared(lookup: Lookup[Any], field: Any, value: Any) -> bool | None:
    match lookup:
        case IsNull():
            return bool(lookup.rhs) == (value is None)
        case Exact():
            return _equal(field, value, lookup.rhs)
        case In(rhs=list() | tuple() | set() | frozenset()):
            return _joined(OR, [_equal(field, value, each) for each in lookup.rhs])
    return None


def _equal(field: Any, one: Any, other: Any) -> bool | None:
    if one is _SET or not is_constant(other):
        return None
    try:
        one, other = field.get_prep_value(one), field.get_prep_value(other)
    except (TypeError, ValueError, ValidationError):
        return None
    if not (isinstance(one, _PLAIN) and isinstance(other, _PLAIN)):
        return None
    # A case-insensitive column matches the same rows in upper and lower case.
    return str(one).casefold() == str(other).casefold()
