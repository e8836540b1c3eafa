"""Which conditions of a question a flip decides for all rows alike.

A flip that is tried on one row and takes it out of pending may leave another: ``sent=True`` does
so for ``Q(sent=False) | Q(weight=5)``. What a row asks beside the flip's columns makes the
difference. A condition that reads nothing but columns to which the flip writes constants has one
answer after the flip, whatever row it is; if one such condition fails, no row stays pending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from django.db.models import QuerySet, Transform, Value, lookups
from django.db.models.expressions import Col
from django.db.models.fields import json, related_lookups
from django.db.models.functions import Now
from django.db.models.sql.datastructures import Join
from django.db.models.sql.where import AND, WhereNode

from dcl_processor.clock import DatabaseNow

#: Where Django's own lookups are, which read what they are given and nothing else.
_LOOKUPS = frozenset({lookups.__name__, related_lookups.__name__, json.__name__})


def decided(queryset: QuerySet[Any, Any], columns: Collection[str]) -> QuerySet[Any, Any] | None:
    """Return the rows that meet all conditions which read those columns alone, if there are any.

    ``columns``: the attnames of those that are written as constants. Every pending row is among
    the rows returned, which are asked for without any other table, but for a parent's.
    """
    query = queryset.query.chain()
    own = {alias for alias in query.alias_map if _is_own(query, alias)}
    some = [node for node in _demands(query.where) if _reads_only(node, own, columns)]
    if not some:
        return None
    rows: QuerySet[Any, Any] = QuerySet(queryset.model, using=queryset.db)
    # Joined rows would demand something, too: that there are any.
    for name in ("alias_map", "alias_refcount", "table_map"):
        setattr(rows.query, name, getattr(query, name).copy())
    rows.query.alias_refcount.update(dict.fromkeys(query.alias_map.keys() - own, 0))
    rows.query.where = WhereNode(some)
    return rows.order_by()


def _demands(node: WhereNode) -> Iterator[Any]:
    """Yield the conditions each of which every pending row meets."""
    for child in node.children if node.connector == AND and not node.negated else [node]:
        if isinstance(child, WhereNode) and child is not node:
            yield from _demands(child)
        else:
            yield child


def _is_own(query: Any, alias: str) -> bool:
    """Tell whether it is the row's own table, or that of a parent's part of the row."""
    table = query.alias_map[alias]
    if not isinstance(table, Join):
        return bool(alias == query.base_table)
    links = {*query.get_meta().parents.values()}
    for parent in query.get_meta().all_parents:
        links |= {*parent._meta.parents.values()}
    return table.join_field in links and _is_own(query, table.parent_alias)


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
