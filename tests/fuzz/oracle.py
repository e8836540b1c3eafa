"""What is right, found without any of the package: the queryset evaluated plainly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import Error, connections, transaction

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


def everything(case: Case, using: str = "default") -> dict[Any, Columns]:
    """Return all columns of all rows, by key."""
    names = [field.attname for field in case.world.model._meta.concrete_fields]
    return {
        pk: dict(zip(names, values, strict=True)) for pk, *values in _values(case, using, names)
    }


def _values(case: Case, using: str, names: list[str]) -> list[Any]:
    return list(case.rows(using).values_list("pk", *names))


def pending(case: Case, using: str = "default") -> set[Any]:
    """Return the keys of the pending rows."""
    try:
        with transaction.atomic(using=using):
            rows = list(case.queryset().using(using))
    except ERRORS as error:
        raise NotAskedError from error
    return {getattr(row, "pk", None) for row in rows}


@dataclass(frozen=True)
class Flipped:
    """What a flip makes of one row, alone."""

    leaves: bool
    columns: Columns
    #: Whether Django and the database let it be written at all.
    possible: bool = True


def flipped(case: Case, pk: Any, before: Columns) -> Flipped:
    """Flip one row, look, and take it back."""
    try:
        with transaction.atomic():
            values = {name: v() if callable(v) else v for name, v in case.done().items()}
            case.rows().filter(pk=pk).update(**values)
            looked = Flipped(pk not in pending(case), everything(case)[pk])
            connections["default"].check_constraints()
            transaction.set_rollback(True)
            return looked
    except NotAskedError:
        raise
    except ERRORS:
        return Flipped(leaves=False, columns=before, possible=False)


def clocks(case: Case) -> set[str]:
    """Return the columns that are another one each time they are written."""
    return {"sent_at"} if "Now()" in case.flip else set()
