"""I3: what the handler was given is what the database says under the lock."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.models import Model

from dcl_processor import Delivery
from tests import models as tables
from tests.fuzz.cases import CLOCK, Case
from tests.fuzz.oracle import Columns


def stale_facts(case: Case, row: Any, before: Columns | None) -> list[str]:
    """Return what of a row is not so, or was not asked for when it was locked.

    ``before``: the columns of the row before the first session came to it.
    """
    using = row._state.db
    if case.mark() is None:
        return [*_unlike_the_answer(case, row, _marked(case)), *_unlike_the_row(case, row)]
    if before is None:
        return [f"row {row.pk} was not there"]
    # It is marked, and so not pending any more: asked as it was when it was claimed.
    marked = _marked(case)
    computed = {field.attname for field in row._meta.concrete_fields if field.generated}
    with writing(using):
        case.rows(using).filter(pk=row.pk).update(**{name: before[name] for name in marked})
        stale = _unlike_the_answer(case, row, marked | computed)
        transaction.set_rollback(True, using=using)
    return [*stale, *_unlike_the_row(case, row)]


@contextmanager
def writing(using: str) -> Iterator[None]:
    """Open a transaction that is to write.

    SQLite's lock for writing comes first: a transaction that has read may not wait for it, and
    Django reads keys before it writes to the table of a parent.
    """
    with transaction.atomic(using=using):
        tables.Tag.objects.using(using).filter(pk=-1).update(name="")
        yield


def _unlike_the_answer(case: Case, row: Any, marked: Collection[str]) -> list[str]:
    asked = case.queryset().using(row._state.db).filter(pk=row.pk)
    asked.query.select_for_update = False  # there may be no transaction
    found = list(asked)
    if not found:
        return [f"row {row.pk} was handed out and is not pending"]
    facts = _facts(row, marked)
    if all(_facts(each, marked) != facts for each in found):
        return [f"row {row.pk} says {facts}, expected {_facts(found[0], marked)}"]
    return []


def _unlike_the_row(case: Case, row: Any) -> list[str]:
    """Compare the instance's own columns with those of the row as it is now."""
    rows = case.rows(row._state.db)
    own = rows.filter(pk=row.pk).values(*_loaded(row)).get()
    said = {name: row.__dict__[name] for name in own}
    return [] if own == said else [f"row {row.pk} has {said}, expected {own}"]


def _loaded(row: Model) -> list[str]:
    return [f.attname for f in row._meta.concrete_fields if f.attname in row.__dict__]


def _marked(case: Case) -> set[str]:
    fields = case.world.model._meta.concrete_fields
    mark = case.mark() or {}
    names = {field.attname for field in fields if {field.name, field.attname} & mark.keys()}
    # A lease is renewed while the handler runs, and is left out of the instance.
    leased = {CLOCK} if case.delivery is Delivery.AT_LEAST_ONCE else set()
    return names | leased | ({CLOCK} if case.claim is not None and case.timed else set())


def _facts(row: Any, marked: Collection[str], far: int = 2) -> dict[str, Any]:
    """Return columns, annotations, and the rows that came along; two rows may know each other.

    ``marked``: columns that say something else by now, in the row's own table.
    """
    facts = {name: value for name, value in vars(row).items() if not name.startswith("_")}
    facts.pop("loaded", None)  # what a model remembers of itself
    if far:
        for name, other in row._state.fields_cache.items():
            facts[f"{name}.*"] = None if other is None else _facts(other, marked, far - 1)
        for name, others in getattr(row, "_prefetched_objects_cache", {}).items():
            some = (_facts(other, marked, 0) for other in others)
            facts[f"{name}.*"] = sorted(some, key=repr)
    for name in marked:
        facts.pop(name, None)
        # A key that was marked has forgotten the row that came along.
        facts.pop(f"{name.removesuffix('_id')}.*", None)
    return facts
