"""The kinds of a ``pending`` query, called a question, and how it is narrowed to one row.

*Own-table*: every condition compares a column of the model's own table with a constant, a
column of the same row, or the database's clock. Only then may the lock and the second check be
one statement. PostgreSQL re-evaluates the WHERE clause of a row that changed before the lock was
taken, but only against the locked row's new version. A join, a subquery or a function still reads
the statement's old snapshot, which would return rows that are done already.

*Spanning*: everything else. The row is locked by primary key first, and a second statement with a
snapshot of its own checks the whole question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from django.db import router
from django.db.models import Case, IntegerField, Model, Q, QuerySet, Transform, Value, When, lookups
from django.db.models.expressions import Col
from django.db.models.fields import json, related_lookups
from django.db.models.functions import Now
from django.db.models.query import ModelIterable, ValuesIterable
from django.db.models.sql.where import AND, WhereNode

from dcl_processor.clock import DatabaseNow
from dcl_processor.compiled_sql.cache import StatementCache
from dcl_processor.compiled_sql.placeholders import KeyPlaceholder
from dcl_processor.exceptions import InvalidPending
from dcl_processor.masking import shown

M = TypeVar("M", bound=Model)

#: The modules of Django's own lookups: one that a user registered may compile to any SQL.
PLAIN_LOOKUPS = frozenset({lookups.__name__, related_lookups.__name__})
_LOOKUPS = PLAIN_LOOKUPS | {json.__name__}


@dataclass(frozen=True, slots=True)
class Question(Generic[M]):
    """The user's ``pending`` queryset, as it was returned for one window of rows."""

    #: The user's queryset on the alias that is locked and written, narrowed by the run's filter
    #: to the rows that may be tried now.
    queryset: QuerySet[M, M]
    #: The user's queryset alone.
    unfiltered: QuerySet[M, M]
    #: The concrete model whose rows are locked.
    model: type[M]
    using: str
    own_table: bool
    #: The statements that were compiled for this window.
    statements: StatementCache = field(default_factory=StatementCache, compare=False)
    #: Those that write rows by their keys, which do not depend on the question.
    writes: StatementCache = field(default_factory=StatementCache, compare=False)

    @property
    def table(self) -> QuerySet[M, M]:
        """Every row of the model, including those that a manager of the user's would hide."""
        return rows_of(self.model, self.using)

    def among(self, pks: Collection[Any]) -> QuerySet[M, M]:
        """Narrow the question to some rows, with everything that the handler's row needs."""
        return self.narrowed(KeyList(pks))

    def narrowed(self, rows: RowFilter) -> QuerySet[M, M]:
        """Narrow the question to the rows of the filter."""
        return self.queryset.filter(rows.condition).order_by()

    def still_pending(self, pks: Collection[Any]) -> QuerySet[M, M]:
        """Return those of the rows that are pending, even if they are not due or filtered out."""
        return self.unfiltered.filter(these(pks)).order_by()

    def bare(self, pk: Any) -> QuerySet[M, M]:
        """Return a queryset of a row, which need not be pending: a mark takes it out of there.

        The row has the class, the related rows and the deferred columns of a pending one. It has no
        annotations: without the conditions of ``pending`` they may be others.
        """
        rows = rows_of(self.unfiltered.model, self.using).filter(pk=pk)
        query, asked = rows.query, self.unfiltered.query
        query.select_related, query.deferred_loading = asked.select_related, asked.deferred_loading
        given: Any = self.unfiltered
        lookups = given._prefetch_related_lookups  # noqa: SLF001  # it has no public name
        return rows.prefetch_related(*lookups)


def rows_of(model: type[M], using: str) -> QuerySet[M, M]:
    """Return every row of a model, read as for a write: no cache of queries is to answer."""
    rows: Any = QuerySet(model, using=using)
    rows._for_write = True  # noqa: SLF001  # as Django sets it for get_or_create() and the like
    return cast("QuerySet[M, M]", rows)


def own_aliases(queryset: QuerySet[Any, Any]) -> set[str]:
    """Return the aliases of a row's own tables; a relation may join the same tables once more."""
    query = queryset.query
    own = {query.base_table}
    for alias, join in query.alias_map.items():
        link: Any = getattr(join, "join_field", None)
        is_link = link is not None and getattr(link.remote_field, "parent_link", False)
        if is_link and join.parent_alias in own:
            own.add(alias)
    return own


def order_of(queryset: QuerySet[Any, Any]) -> Sequence[Any]:
    """Return the order of an ``order_by()``; the model's ``Meta.ordering`` does not count."""
    return queryset.query.order_by


def is_ordered(queryset: QuerySet[Any, Any]) -> bool:
    """Return whether the user has ordered the rows; otherwise they come by primary key."""
    return bool(queryset.query.order_by or queryset.query.extra_order_by)


def demanded(where: WhereNode) -> Iterator[Any]:
    """Yield the conditions that hold for every row."""
    if where.negated or where.connector != AND:
        yield where
        return
    for child in where.children:
        if isinstance(child, WhereNode):
            yield from demanded(child)
        else:
            yield child


def these(pks: Collection[Any], column: str = "pk") -> Q:
    """Name rows by their primary keys; a single key is compared, not looked up in a list."""
    [*some] = pks
    return Q(**{column: some[0]}) if len(some) == 1 else Q(**{f"{column}__in": some})


@dataclass(frozen=True, slots=True)
class KeyList:
    """The rows with these primary keys; ``column``: with these values of another column."""

    pks: Collection[Any]
    column: str = "pk"

    @property
    def condition(self) -> Q:
        return these(self.pks, self.column)

    def order(self) -> Any:
        places = [When(pk=pk, then=place) for place, pk in enumerate(self.pks)]
        return Case(*places, output_field=IntegerField())


#: Rows that a statement is about, by their keys, which may be given later. ``condition``: is true
#: for these rows; ``order()``: sorts them in the order in which their keys are given.
RowFilter = KeyList | KeyPlaceholder


def ask(
    source: Any,
    *,
    label: str,
    filter: Q | None = None,
    using: str | None = None,
    due: Callable[[type[Model]], Q | None] | None = None,
    defer: Collection[str] = (),
    writes: dict[type[Model], StatementCache] | None = None,
) -> Question[Any]:
    """Return the question for the next window.

    ``source``: a queryset or a callable that returns one. ``due``: returns, for the model, the
    processor's own condition for a row that may be tried now.
    ``defer``: columns that are not loaded for the handler's instance. ``writes``: by model, the
    statements of other windows that write rows. Raises ``InvalidPending`` for a queryset whose rows
    cannot be locked and checked one by one.
    """
    unfiltered: Any = source.all() if isinstance(source, QuerySet) else source()
    refuse(unfiltered, label)
    # From the hints a sharding router learns which instance a related manager belongs to.
    hints = unfiltered._hints  # noqa: SLF001  # Django has no other name for them
    chosen = unfiltered._db  # noqa: SLF001  # .db would ask the router
    alias = using or chosen or router.db_for_write(unfiltered.model, **hints)
    unfiltered = unfiltered.using(alias)
    # Race: double claim. No cache of queries is to answer for a claim, nor after it.
    unfiltered._for_write = True  # noqa: SLF001  # as above
    # A related manager would set its one related instance on every row, however old that is.
    unfiltered._known_related_objects = {}  # noqa: SLF001  # as above
    # The lock-free read must not lock, and the claim adds a lock of its own.
    unfiltered.query.select_for_update = False
    queryset = unfiltered
    for condition in (filter, due(unfiltered.model) if due is not None else None):
        queryset = queryset if condition is None else queryset.filter(condition)
    queryset = queryset.defer(*defer)
    refuse(queryset, label)
    model = queryset.model._meta.concrete_model
    return Question(
        queryset=queryset,
        unfiltered=unfiltered,
        model=model,
        using=alias,
        # Race: stale second check. Only for such a question may the lock check it as well.
        own_table=is_own_table(queryset),
        writes=StatementCache() if writes is None else writes.setdefault(model, StatementCache()),
    )


def refuse(queryset: Any, label: str) -> None:
    """Raise ``InvalidPending`` for a shape that cannot be narrowed to one row and locked."""
    if got := _refused_shape(queryset):
        raise InvalidPending(
            f"{label}: expected pending to be a queryset of model instances that can be narrowed "
            f"to one row, got {got}."
        )


def _refused_shape(queryset: Any) -> str | None:
    if not isinstance(queryset, QuerySet):
        got = shown(repr(queryset), 100)
        return f"{got}, of type {type(queryset).__name__}; return Model.objects.filter(…)"
    query = queryset.query
    if query.combinator:
        article = "an" if query.combinator == "intersection" else "a"
        return f"{article} {query.combinator}(); write it as one filter with Q objects"
    if query.is_sliced:
        return "a slice; pass limit= to the run instead"
    kind: Any = queryset._iterable_class  # noqa: SLF001  # Django has no other name for it
    if not issubclass(kind, ModelIterable):
        called = "values()" if kind is ValuesIterable else "values_list() or dates()"
        return f"{called}; remove that call"
    if query.distinct_fields:
        return "distinct() on columns, which gives other rows once it is narrowed; use a subquery"
    if query.where.contains_over_clause or _has_window(query.annotations.values()):
        return "a window expression, which gives other values once it is narrowed; use a subquery"
    return None


def _has_window(annotations: Iterable[Any]) -> bool:
    return any(annotation.contains_over_clause for annotation in annotations)


def is_own_table(queryset: QuerySet[Any, Any]) -> bool:
    """Return whether lock and second check may be one statement, by a list of what is allowed."""
    query = queryset.query
    concrete = queryset.model._meta.concrete_model
    assert concrete is not None
    joined = {alias for alias, count in query.alias_refcount.items() if count}
    plain = not (
        query.annotations
        or query.extra
        or query.extra_tables
        or query.select_related
        or query.distinct
        or query.group_by
        or joined - {query.base_table}
        # An unmanaged model may be a view, which may contain any join or condition.
        or not concrete._meta.managed
        or any(f.model._meta.concrete_model is not concrete for f in concrete._meta.concrete_fields)
    )
    return plain and _reads_only(query.where, {query.base_table})


# --- the conditions that have the same result for all rows after a flip
#
# A flip that takes one row out of pending may leave another row pending: ``sent=True`` does so for
# ``Q(sent=False) | Q(weight=5)``. The difference is in the conditions on columns that the flip does
# not write. A condition that reads only columns to which the flip writes constants has the same
# result for every row after the flip; if one such condition fails, no row stays pending.
#
# A mark on a lease must leave its row pending. It does so for every row if it does for one, and
# each condition reads either such columns, or columns that the mark does not write.


def decided(queryset: QuerySet[Any, Any], columns: Collection[str]) -> QuerySet[Any, Any] | None:
    """Return the rows that meet all conditions on those columns alone; ``None`` without such ones.

    ``columns``: the attnames of the columns that are written as constants. The rows returned
    include every pending row; the query uses no other table, except for a parent's.
    """
    query, own = queryset.query.chain(), own_aliases(queryset)
    some = [node for node in demanded(query.where) if _reads_only(node, own, columns)]
    if not some:
        return None
    rows: QuerySet[Any, Any] = rows_of(queryset.model, queryset.db)
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


def _reads_only(
    node: Any, own: Collection[str | None], columns: Collection[str] | None = None
) -> bool:
    """Return whether a condition reads nothing but columns of a row's own tables.

    ``own``: the aliases of these tables. ``columns``: the attnames of the columns, which Django's
    own transforms may change; ``None``: any, each as it is.
    """
    module = type(node).__module__
    match node:
        case WhereNode():
            return all(_reads_only(child, own, columns) for child in node.children)
        case Col():
            return node.alias in own and (columns is None or node.target.attname in columns)
        case lookups.Lookup() if module in (PLAIN_LOOKUPS if columns is None else _LOOKUPS):
            return _reads_only(node.lhs, own, columns) and _reads_only(node.rhs, own, columns)
        case Transform() if columns is not None and module.startswith("django.db.models."):
            return all(_reads_only(each, own, columns) for each in node.get_source_expressions())
        case list() | tuple() | set() | frozenset():
            return all(_reads_only(each, own, columns) for each in node)
    if type(node) in (Value, Now, DatabaseNow):
        return True
    return not hasattr(node, "resolve_expression") and not hasattr(node, "as_sql")
