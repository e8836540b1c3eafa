"""What is right, found without any of the package: the queryset evaluated plainly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import Error, connections, transaction

from dcl_processor import Delivery
from tests.fuzz.cases import Case

Columns = Mapping[str, Any]


#: What Django and the drivers raise for what they do not take.
ERRORS = (
    Error,
    FieldDoesNotExist,
    FieldError,
    ValidationError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)


class NotAskedError(Exception):
    """Django or the database refuses the queryset itself."""


def everything(case: Case) -> dict[Any, Columns]:
    """Return all columns of all rows, by key."""
    names = [field.attname for field in case.world.model._meta.concrete_fields]
    rows = case.rows().values_list("pk", *names)
    return {pk: dict(zip(names, values, strict=True)) for pk, *values in rows}


def pending(case: Case) -> set[Any]:
    """Return the keys of the pending rows."""
    try:
        with transaction.atomic():
            rows = list(case.queryset().using("default"))
    except ERRORS as error:
        raise NotAskedError from error
    return {getattr(row, "pk", None) for row in rows}


@dataclass(frozen=True)
class Flipped:
    """What the flips make of one row, alone."""

    leaves: bool
    columns: Columns
    #: Whether Django and the database let them be written at all.
    possible: bool = True
    #: Whether the row may be handed out: what is written before, if it is, takes it out of pending.
    may_start: bool = True
    #: What it says when its handler was called, and its flip could not be kept.
    left_as: Columns = field(default_factory=dict)


def flipped(case: Case, pk: Any, before: Columns) -> Flipped:
    """Flip one row, look, and take it back."""
    left_as, marked = before, True
    try:
        with transaction.atomic():
            if case.claim is not None and case.delivery == Delivery.AT_MOST_ONCE:
                _write(case, pk, case.mark() or {})
                left_as, marked = everything(case)[pk], pk not in pending(case)
            _write(case, pk, case.done())
            leaves, columns = pk not in pending(case), everything(case)[pk]
            # Of the row's own tables: MariaDB is slow to tell what constraints there are.
            meta = case.rows().model._meta
            models = [meta.model, *meta.all_parents]
            connections["default"].check_constraints([each._meta.db_table for each in models])
            transaction.set_rollback(True)
    except NotAskedError:
        raise
    except ERRORS:
        return Flipped(leaves=False, columns=before, possible=False, left_as=left_as)
    if case.delivery == Delivery.AT_MOST_ONCE and case.claim is None:
        marked = leaves
    return Flipped(marked and leaves, columns, may_start=marked, left_as=left_as)


def _write(case: Case, pk: Any, values: Mapping[str, Any]) -> None:
    if not values:
        return
    resolved = {name: v() if callable(v) else v for name, v in values.items()}
    case.rows().filter(pk=pk).update(**resolved)


def clocks(case: Case) -> set[str]:
    """Return the columns that are another one each time they are written."""
    return {"sent_at"} if "Now()" in case.flip else set()
