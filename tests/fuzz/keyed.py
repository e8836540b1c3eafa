"""What holds of keys: how many rows of one are in flight, and in which order they are handled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils import timezone

from dcl_processor import Delivery
from tests.fuzz.cases import CLOCK, Case
from tests.fuzz.oracle import Columns

if TYPE_CHECKING:
    from tests.fuzz.meeting import Met


def column_of(case: Case) -> str:
    """Return the column of the key."""
    field: Any = case.world.model._meta.get_field(case.key or "")
    name: str = field.attname
    return name


def order_of(case: Case) -> list[Any]:
    """Return the pending rows in their order, if they are to be handled in one."""
    if not case.options.get("in_order"):
        return []
    asked = case.queryset()
    query = asked.query
    default = query.get_meta().ordering if query.default_ordering else ()
    ordered = asked.order_by(*(query.order_by or default), "pk")
    ordered.query.select_for_update = False
    return list(dict.fromkeys(row.pk for row in ordered))


def key_of(case: Case, met: Met, row: Any) -> Any:
    """Return the key of a row; ``None``: it has none."""
    before = met.before.get(row.pk)
    return None if case.key is None or before is None else before[column_of(case)]


@contextmanager
def at_work(case: Case, met: Met, row: Any) -> Iterator[None]:
    """Count a handler that is at work."""
    key = key_of(case, met, row)
    with met.lock:
        met.at_work[key] += 1
    try:
        yield
    finally:
        with met.lock:
            met.at_work[key] -= 1


def faults(case: Case, met: Met, row: Any) -> list[str]:
    """Return what is wrong with the key of a row when its handler begins."""
    key = key_of(case, met, row)
    if key is None:
        return []
    return [*_in_flight(case, met, row, key), *_overtaken(case, met, row, key)]


def _in_flight(case: Case, met: Met, row: Any, key: Any) -> list[str]:
    most = case.options.get("max_per_group") or 1
    number = met.at_work[key]
    if case.delivery != Delivery.TRANSACTIONAL:
        marked = Q(**{f"{CLOCK}__isnull": False})
        if case.delivery == Delivery.AT_LEAST_ONCE:
            marked = Q(**{f"{CLOCK}__gt": timezone.now()})
        rows = case.rows(row._state.db).filter(marked, **{column_of(case): key})
        number = 1 + rows.exclude(pk=row.pk).count()
    return [f"{number} rows of key {key!r} are in flight, of {most}"] if number > most else []


def _overtaken(case: Case, met: Met, row: Any, key: Any) -> list[str]:
    column = column_of(case)
    of_key = [pk for pk in met.order if met.before[pk][column] == key]
    before = of_key[: of_key.index(row.pk)] if row.pk in of_key else []
    if not before:
        return []
    using = row._state.db
    asked = case.queryset().using(using)
    asked.query.select_for_update = False
    unfinished = {each.pk for each in asked}
    marked = case.rows(using).filter(pk__in=before, **{f"{CLOCK}__isnull": False})
    unfinished |= set(marked.values_list("pk", flat=True))
    passed = unfinished & set(before)
    return [f"row {row.pk} was handled before {passed} of key {key!r}"] if passed else []


def kept_back(case: Case, after: Mapping[Any, Columns]) -> set[Any]:
    """Return the rows that wait for a person to decide on others of their key."""
    if case.key is None or case.delivery != Delivery.AT_MOST_ONCE:
        return set()
    column = column_of(case)
    doubtful = Counter(each[column] for each in after.values() if each[CLOCK] is not None)
    most = case.options.get("max_per_group") or 1
    return {
        pk
        for pk, each in after.items()
        if each[column] is not None and doubtful[each[column]] >= most
    }
