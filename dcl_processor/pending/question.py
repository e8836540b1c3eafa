"""The kinds of a ``pending`` query, called a question, and how it is narrowed to some rows.

*Own-table*: every condition compares a column of the model's own table with a constant, a
column of the same row, or the database's clock. Only then may the lock and the second check be
one statement. PostgreSQL re-evaluates the WHERE clause of a row that changed before the lock was
taken, but only against the locked row's new version. A join, a subquery or a function still reads
the statement's old snapshot, which would return rows that are done already.

*Spanning*: everything else. The row is locked by primary key first, and a second statement with a
snapshot of its own checks the whole question.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from threading import local
from typing import Any, Generic, TypeVar

from django.db import router
from django.db.models import Model, Q, QuerySet, Value, lookups
from django.db.models.expressions import Col
from django.db.models.fields import related_lookups
from django.db.models.functions import Now
from django.db.models.query import ModelIterable, ValuesIterable
from django.db.models.sql.where import WhereNode

from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.report.errors import shown
from dcl_processor.report.exceptions import InvalidPending

M = TypeVar("M", bound=Model)

#: The modules of Django's own lookups: one that a user registered may compile to any SQL.
_PLAIN_LOOKUPS = frozenset({lookups.__name__, related_lookups.__name__})


@dataclass(frozen=True, slots=True)
class Question(Generic[M]):
    """The user's ``pending`` queryset, as it was returned for one window of rows.

    ``queryset``: on the alias that is locked and written, narrowed by the run's filter to the rows
    that may be tried now; ``unfiltered``: the user's alone. ``model``: the concrete model whose
    rows are locked. ``own_table``: the lock may check it as well, unless there are ``claims``;
    ``asks_own_row``: so may an update, of the user's question alone. ``cache``: of the statements
    that are compiled for this window, and for later ones that ask the same.
    """

    queryset: QuerySet[M, M]
    unfiltered: QuerySet[M, M]
    model: type[M]
    using: str
    own_table: bool
    asks_own_row: bool
    #: The conditions for a row that may be tried now, besides the user's question.
    narrowed: Q | None = None
    #: The ``Claims`` of rows with keys: what their claim sends, and asks, besides.
    claims: Any = None
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)
    #: The column of a lease, and the rows of this window that had one when they were read.
    lease: str | None = None
    leftover: set[Any] = field(default_factory=set, compare=False)

    @property
    def table(self) -> QuerySet[M, M]:
        """Every row of the model, including those that a manager of the user's would hide."""
        return for_write(QuerySet(self.model, using=self.using))

    def among(self, pks: Collection[Any]) -> QuerySet[M, M]:
        """Narrow the question to some rows, with everything that the handler's row needs."""
        return self.queryset.filter(these(pks)).order_by()

    def keyed(self, pks: Sequence[Any]) -> QuerySet[M, M]:
        """Narrow the question to the locked rows whose keys let them be claimed."""
        return self.queryset.filter(self.claims.condition(self.unfiltered, pks)).order_by()

    def still_pending(self, pks: Collection[Any]) -> QuerySet[M, M]:
        """Return those of the rows that are pending, even if they are not due or filtered out."""
        return self.unfiltered.filter(these(pks)).order_by()


def these(pks: Collection[Any], column: str = "pk") -> Q:
    """Name rows by their primary keys; a single key is compared, not looked up in a list."""
    [*some] = pks
    return Q(**{column: some[0]}) if len(some) == 1 else Q(**{f"{column}__in": some})


def fenced_by(expected: Mapping[str, Any]) -> Q:
    """Name the rows that have these values; a list: one of them."""
    return Q(**{f"{n}__in" if isinstance(v, list) else n: v for n, v in expected.items()})


def for_write(queryset: QuerySet[M, M]) -> QuerySet[M, M]:
    """Let the queryset read for a write, so that no cache of queries answers for the database."""
    vars(queryset)["_for_write"] = True
    return queryset


def ask(
    source: Any,
    *,
    label: str,
    filter: Q | None = None,
    using: str | None = None,
    due: Callable[[type[Model]], Q | None] | None = None,
    claims: Any = None,
    lease: str | None = None,
) -> Question[Any]:
    """Return the question for the next window; raises ``InvalidPending``.

    ``due``: returns, for the model, the processor's own condition for a row that may be tried now.
    """
    unfiltered: Any = source.all() if isinstance(source, QuerySet) else source()
    refuse(unfiltered, label)
    chosen = unfiltered._db  # noqa: SLF001  # .db would ask the router
    alias = using or chosen or router.db_for_write(unfiltered.model, **unfiltered._hints)  # noqa: SLF001
    unfiltered = for_write(unfiltered.using(alias))
    # A related manager would set its one related instance on every row, however old that is.
    unfiltered._known_related_objects = {}  # noqa: SLF001
    # The lock-free read must not lock, and the claim adds a lock of its own.
    unfiltered.query.select_for_update = False
    asked = (filter, due(unfiltered.model) if due is not None else None)
    some = [Q(condition) for condition in asked if condition is not None]
    narrowed = reduce(and_, some) if some else None
    queryset = unfiltered if narrowed is None else unfiltered.filter(narrowed)
    refuse(queryset, label)
    return Question(
        queryset=queryset,
        unfiltered=unfiltered,
        model=queryset.model._meta.concrete_model,
        using=alias,
        # Race: stale second check. Only for such a question may the lock check it as well.
        own_table=is_own_table(queryset),
        asks_own_row=is_own_table(unfiltered),
        narrowed=narrowed,
        claims=claims,
        lease=lease,
    )


#: Of this thread, for each processor: what its last question was, and its compiled statements.
_known = local()

#: So many compiled statements are kept; a ``done`` with an expression for each row makes more.
_KEPT = 32


def with_known_statements(question: Question[M], label: str) -> Question[M]:
    """Let a question have the statements of the processor's last one, if it is the same.

    It takes Django longer to compile them than to run them, and most runs handle few rows.
    """
    queryset, known = question.queryset, vars(_known)
    state = vars(queryset)
    has_more = state["_prefetch_related_lookups"] or {*state} - {*vars(question.table)}
    if not question.own_table or question.claims is not None or has_more:
        return question
    try:
        queries = pickle.dumps((queryset.query, question.unfiltered.query))
    except Exception:  # noqa: BLE001  # a value of the user's own that cannot be compared
        return question
    kind = type(queryset), state["_iterable_class"], state.get("_fetch_mode")  # Django 6.1
    same = kind, question.using, queries
    before, statements = known.get(label, (None, {}))
    if before != same or len(statements) > _KEPT:
        statements = {}
    known[label] = same, statements
    return replace(question, cache=statements)


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
    kind: Any = queryset._iterable_class  # noqa: SLF001
    if not issubclass(kind, ModelIterable):
        called = "values()" if kind is ValuesIterable else "values_list() or dates()"
        return f"{called}; remove that call"
    if query.distinct_fields:
        return "distinct() on columns, which gives other rows once it is narrowed; use a subquery"
    if query.where.contains_over_clause or any(
        each.contains_over_clause for each in query.annotations.values()
    ):
        return "a window expression, which gives other values once it is narrowed; use a subquery"
    return None


def is_own_table(queryset: QuerySet[Any, Any]) -> bool:
    """Return whether lock and second check may be one statement, by a list of what is allowed."""
    query = queryset.query
    concrete = queryset.model._meta.concrete_model
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


def _reads_only(node: Any, own: Collection[str | None]) -> bool:
    """Return whether a condition reads nothing but plain columns of a row's own table."""
    match node:
        case WhereNode():
            return all(_reads_only(child, own) for child in node.children)
        case Col():
            return node.alias in own
        case lookups.Lookup() if type(node).__module__ in _PLAIN_LOOKUPS:
            return _reads_only(node.lhs, own) and _reads_only(node.rhs, own)
        case list() | tuple() | set() | frozenset():
            return all(_reads_only(each, own) for each in node)
    if type(node) in (Value, Now, DatabaseNow):
        return True
    return not hasattr(node, "resolve_expression") and not hasattr(node, "as_sql")
