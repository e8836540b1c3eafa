"""Every shape of pending queryset that a run accepts, and what is to be known of each.

A shape makes its own pending rows, each independent of the others. Rows leave it in two ways: they
are *finished* as another copy finishes them (``done``, or ``finish`` where the handler does it),
or they *leave* because something beside them changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import connection, transaction
from django.db.models import Model, Q, QuerySet

POSTGRESQL, MARIADB, SQLITE = "postgresql", "mysql", "sqlite"


@dataclass(frozen=True)
class Shape:
    """One shape: ``pending`` over the model of the rows that ``make`` makes."""

    name: str
    pending: Any
    make: Callable[[], Model]
    #: The flip; None when the handler is to ``finish`` the row.
    done: Mapping[str, Any] | None = field(default_factory=lambda: {"sent": True})
    #: Finish a row by its key on an alias, other than by ``done``.
    finish: Callable[[Any, str], object] | None = None
    #: Let a row leave by a change beside it.
    leave: Callable[[Any, str], object] | None = None
    #: Whether lock and second check in *one* statement would hand out a row that is done.
    is_double: bool = True
    #: A column that another session edits, and that the question does not ask.
    spare: str | None = None
    filter: Q | None = None
    #: The alias that a run locks and writes.
    using: str = "default"
    vendors: tuple[str, ...] = (POSTGRESQL, MARIADB, SQLITE)

    def __str__(self) -> str:
        return self.name

    def queryset(self) -> QuerySet[Any]:
        """Return what is pending, narrowed as the run is."""
        queryset: QuerySet[Any] = self.pending() if callable(self.pending) else self.pending
        return queryset if self.filter is None else queryset.filter(self.filter)

    def model(self) -> type[Model]:
        """Return the model whose rows are locked."""
        concrete: type[Model] | None = self.queryset().model._meta.concrete_model
        assert concrete is not None
        return concrete

    def take_out(self, row: Model, using: str) -> None:
        """Take a row out of pending, in the transaction that is open."""
        if self.finish is not None:
            self.finish(row.pk, using)
        else:
            row_of(row, using).update(**self.done or {})

    def finish_as_another_copy(self, row: Model, using: str) -> None:
        """Lock a row, take it out and commit, as a copy of the same processor does."""
        with transaction.atomic(using=using):
            assert lock(row_of(row, using))
            self.take_out(row, using)


def row_of(row: Model, using: str) -> QuerySet[Any]:
    """Return the row as another session knows it, be it hidden by a manager or not."""
    concrete = row._meta.concrete_model
    assert concrete is not None
    return QuerySet(concrete, using=using).filter(pk=row.pk)


def lock(rows: QuerySet[Any]) -> list[Any]:
    """Lock rows in their own table, where the database has such locks, and return their keys."""
    no_key = connection.features.has_select_for_no_key_update
    return list(rows.order_by().select_for_update(no_key=no_key).values_list("pk", flat=True))


def here(shapes: list[Shape]) -> list[Shape]:
    """Return those of the shapes that the database of this suite can be asked."""
    names = [shape.name for shape in shapes]
    assert len(names) == len(set(names)), names
    return [shape for shape in shapes if connection.vendor in shape.vendors]
