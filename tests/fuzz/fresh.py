"""I3: what the handler was given is what the database says under the lock."""

from __future__ import annotations

from typing import Any

from django.db.models import Model, QuerySet

from tests.fuzz.cases import Case


def stale_facts(case: Case, row: Any) -> list[str]:
    """Return what of a row is not so, or not asked for any more."""
    using = row._state.db
    found = list(case.queryset().using(using).filter(pk=row.pk))
    if not found:
        return [f"row {row.pk} was handed out and is not pending"]
    facts = _facts(row)
    if all(_facts(each) != facts for each in found):
        return [f"row {row.pk} says {facts}, expected {_facts(found[0])}"]
    own = QuerySet(case.world.model, using=using).filter(pk=row.pk).values(*_loaded(row)).get()
    said = {name: row.__dict__[name] for name in own}
    return [] if own == said else [f"row {row.pk} has {said}, expected {own}"]


def _loaded(row: Model) -> list[str]:
    return [f.attname for f in row._meta.concrete_fields if f.attname in row.__dict__]


def _facts(row: Any, far: int = 2) -> dict[str, Any]:
    """Return columns, annotations, and the rows that came along; two rows may know each other."""
    facts = {name: value for name, value in vars(row).items() if not name.startswith("_")}
    facts.pop("loaded", None)  # what a model remembers of itself
    if not far:
        return facts
    for name, other in row._state.fields_cache.items():
        facts[f"{name}.*"] = None if other is None else _facts(other, far - 1)
    for name, others in getattr(row, "_prefetched_objects_cache", {}).items():
        facts[f"{name}.*"] = sorted((_facts(other, 0) for other in others), key=repr)
    return facts
