"""The mark that a claim writes to a row that is handled outside the claim's transaction.

A mark is committed before the handler is called. A settlement writes only if the row still has the
mark, because another worker may have taken the row over, or an operator may have settled it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import F, Model, Value
from django.db.models.functions import Coalesce
from django.db.models.signals import post_init

from dcl_processor.candidates.question import these
from dcl_processor.clock import DatabaseNow
from dcl_processor.compiled_sql.cache import signature
from dcl_processor.definition.kinds import Lease
from dcl_processor.definition.model_columns import by_attname
from dcl_processor.values import Values, resolve

if TYPE_CHECKING:
    from dcl_processor.candidates.question import Question
    from dcl_processor.definition.definition import Definition

    from .settlement import Held

_NOW = DatabaseNow()


@dataclass(frozen=True, slots=True)
class Mark:
    """What a claim writes to its rows; columns are named by their ``attname``.

    ``values``: what is written, expressions included; ``name``: the key of the compiled statement.
    ``time``: the one of these columns that is set from the database's clock, which distinguishes
    the mark from that of any other worker; ``None``: no column does.
    ``removed``: what removes the mark from a settled row; ``reset``: what is written besides to a
    row that was not handled. ``undone``: the values that put back a row after its handler was
    called; ``None``: it stays claimed. ``option``: the option that the mark writes, "claim" or
    "done"; ``None``: it writes none. ``lease``: hides the row, which stays in pending, until it
    lapses; ``None``: the option has to take the row out of pending.
    """

    values: Values
    name: Hashable
    time: str | None
    removed: Values
    undone: Values | None
    option: str | None
    lease: Lease | None = None
    reset: Values = field(default_factory=dict)

    @property
    def is_lease(self) -> bool:
        return self.lease is not None

    def put_back(self, before: Values) -> Values:
        """Return the values that put back a row whose handler was not called.

        ``before``: what its columns contained before the claim. Under a lease its mark is not
        written: it may be that of a dead worker whose row this worker has taken over.
        """
        if self.lease is None:
            return before
        back = {**(self.undone or {})}
        if before.get(self.lease.field) is not None:
            # The worker before did not settle the row, and nothing was found out about that.
            back[self.lease.field] = self.lease.taken_away
        return back


def show(row: Any, values: Values) -> None:
    """Let the instance have the row's values, so that the handler's ``save()`` keeps them.

    Past its attributes, which may refuse an assignment, or count it as a change. Fields that the
    user's queryset deferred stay deferred.
    """
    known = vars(row)
    for name, value in values.items():
        if name in known:
            known[name] = value


def looks_at_loading(model: Any) -> bool:
    """Return whether an instance may know how it was loaded, and take a mark for a change."""
    plain = (model.__init__, model.from_db.__func__) == (Model.__init__, Model.from_db.__func__)  # type: ignore[attr-defined]
    return not plain or post_init.has_listeners(model)


def column(question: Question[Any], rows: Sequence[Held], name: str) -> dict[Any, Any]:
    """Return a column's values by the rows' keys, as they were read under the lock."""
    known = {held.pk: vars(held.row) for held in rows}
    is_deferred = any(name not in values for values in known.values())
    # An instance that was not made by Django alone may be an older one.
    if is_deferred or any(looks_at_loading(type(held.row)) for held in rows):
        return dict(question.table.filter(these(known)).values_list("pk", name))
    return {pk: values[name] for pk, values in known.items()}


def mark_of(processor: Definition[Any], model: Any, *, is_held: bool = False) -> Mark:
    """Return the mark of a processor's claims.

    AT_MOST_ONCE: the ``claim``, or without one the flip itself. AT_LEAST_ONCE: a lease, and the
    attempt, counted before a crash can hide it; with a ``claim`` the lease and the claim are one
    mark, which one statement writes and removes. ``is_held``: the row was claimed earlier, so that
    nothing is written again, and no callable of ``claim`` is called.
    """
    lease, at, claim = processor.lease, processor.claimed_at, processor.claim
    time, none = ({at: _NOW}, {at: None}) if at else ({}, {})
    chosen: Values = claim or ({} if lease is not None else processor.done or {})
    values = by_attname(model, {**({} if is_held else resolve(chosen)), **time})
    if lease is None:
        undone = None if processor.reset is None else {**none, **processor.reset}
        return Mark(values, signature(values), at, none, undone, "claim" if claim else "done")
    reset = by_attname(model, (claim and processor.reset) or {})
    removed = {**none, lease.field: None}
    undone = {**reset, **removed}
    values[lease.field] = _NOW + timedelta(seconds=lease.seconds)
    if processor.retry is not None and (count := processor.retry.attempts) is not None:
        values[count] = Coalesce(F(count), Value(0)) + 1
        undone[count] = F(count) - 1
    option = "claim" if claim else None
    return Mark(values, signature(values), lease.field, removed, undone, option, lease, reset)
