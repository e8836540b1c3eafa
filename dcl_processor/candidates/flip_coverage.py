"""Find the conditions of a question that have the same result for all rows after a flip.

A flip that takes one row out of pending may leave another row pending: ``sent=True`` does so for
``Q(sent=False) | Q(weight=5)``. The difference is in the conditions on columns that the flip does
not write. A condition that reads only columns to which the flip writes constants has the same
result for every row after the flip; if one such condition fails, no row stays pending.

A mark on a lease must leave its row pending. It does so for every row if it does for one, and each
condition reads either such columns, or columns that the mark does not write.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db.models import QuerySet, Transform, Value, lookups
from django.db.models.expressions import Col
from django.db.models.fields import json, related_lookups
from django.db.models.functions import Now
from django.db.models.sql.where import WhereNode

from dcl_processor.clock import DatabaseNow

from .question import demanded, own_aliases

#: The modules of Django's own lookups, which read only their operands.
_LOOKUPS = frozenset({lookups.__name__, related_lookups.__name__, json.__name__})


def decided(queryset: QuerySet[Any, Any], columns: Collection[str]) -> QuerySet[Any, Any] | None:
    """Return the rows that meet all conditions on those columns alone; ``None`` without such ones.

    ``columns``: the attnames of the columns that are written as constants. The rows returned
    include every pending row; the query uses no other table, except for a parent's.
    """
    query, own = queryset.query.chain(), own_aliases(queryset)
    some = [node for node in demanded(query.where) if _reads_only(node, own, columns)]
    if not some:
        return None
    rows: QuerySet[Any, Any] = QuerySet(queryset.model, using=queryset.db)
    # A join would be a condition, too, because the joined rows must exist.
    for name in ("alias_map", "alias_refcount", "table_map"):
        setattr(rows.query, name, getattr(query, name).copy())
    rows.query.alias_refcount.update(dict.fromkeys(query.alias_map.keys() - own, 0))
    rows.query.where = WhereNode(some)
    return rows.order_by()


def keeps_all(
    queryset: QuerySet[Any, Any], constants: Collection[str], written: Collection[str]
) -> bool:
    """Return whether a write that leaves one pending row pending leaves every one pending.

    ``written``: the attnames of the columns that it writes; ``constants``: those of them that have
    the same value in all rows afterwards. Each condition must read the constants alone, or columns
    that are not written.
    """
    query, own = queryset.query, own_aliases(queryset)
    if {alias for alias, count in query.alias_refcount.items() if count} - own:
        return False
    fields = queryset.model._meta.concrete_fields
    others = {field.attname for field in fields}.difference(written)
    return all(
        _reads_only(node, own, constants) or _reads_only(node, own, others)
        for node in demanded(query.where)
    )


def _reads_only(node: Any, own: Collection[str], columns: Collection[str]) -> bool:
    match node:
        case WhereNode():
            return all(_reads_only(child, own, columns) for child in node.children)
        case Col():
            return node.alias in own and node.target.attname in columns
        case Value() | Now() | DatabaseNow():
            return True
        case lookups.Lookup() if type(node).__module__ in _LOOKUPS:
            return _reads_only(node.lhs, own, columns) and _reads_only(node.rhs, own, columns)
        case Transform() if type(node).__module__.startswith("django.db.models."):
            return all(_reads_only(each, own, columns) for each in node.get_source_expressions())
        case list() | tuple() | set() | frozenset():
            return all(_reads_only(each, own, columns) for each in node)
    return not hasattr(node, "resolve_expression") and not hasattr(node, "as_sql")
