"""Groups: rows with the same key, which share the number of rows that may be in flight at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db.models import (
    BooleanField,
    CharField,
    DateField,
    DateTimeField,
    IntegerField,
    Model,
    Q,
    TextField,
    UUIDField,
)

from dcl_processor.exceptions import InvalidOption
from dcl_processor.values import Values, constants_of

from .kinds import Lease
from .model_columns import in_parents_table

if TYPE_CHECKING:
    from .definition import Definition

#: Columns whose equal values have one spelling, from which a lock's number can be computed.
KINDS = (IntegerField, UUIDField, BooleanField, DateField, CharField, TextField)


@dataclass(frozen=True, slots=True)
class Groups:
    """How the rows of one key are claimed.

    ``column``: the attname of the key. ``most``: rows in flight per key; ``None``: those of one
    batch, which are handled one after another.
    ``in_flight``: recognises a row that was claimed and not settled; ``None``: only the key's
    lock does. ``lease``: how long such a row is in flight; ``None``: until it is settled.
    ``unmarked``: the values that remove the mark of a dead worker from a row.
    """

    model: type[Model]
    column: str
    in_order: bool
    most: int | None
    in_flight: Q | None
    lease: Lease | None
    unmarked: Values

    @property
    def field(self) -> Any:
        """Return the field of the column."""
        return self.model._meta.get_field(self.column)

    @property
    def target(self) -> Any:
        """Return the field of the values, behind all relations."""
        return _target(self.field)


@dataclass(frozen=True, slots=True)
class Key:
    """One key, as it was read; never ``None``, because rows without a key are in no group."""

    groups: Groups
    value: Any


def groups_of(processor: Definition[Any], model: type[Model]) -> Groups:
    """Return the rules for the keys of a processor that has ``group_by``.

    Raises ``InvalidOption`` unless the model has a column that can be a key.
    """
    field = _key_column(processor, model)
    return Groups(
        model=model,
        column=field.attname,
        in_order=processor.in_order,
        most=1 if processor.in_order else processor.max_per_group,
        in_flight=_in_flight(processor),
        lease=processor.lease,
        unmarked=_unmarked(processor),
    )


def _unmarked(processor: Definition[Any]) -> dict[str, Any]:
    lease, at = processor.lease, processor.claimed_at
    if lease is None:
        return {}
    reset = processor.reset if processor.claim else None
    # Not NULL: the next worker is to learn that another one had the row.
    return {**(reset or {}), **({at: None} if at else {}), lease.field: lease.taken_away}


def _in_flight(processor: Definition[Any]) -> Q | None:
    if processor.lease is not None:
        return processor.lease.in_flight()
    if processor.claimed_at is not None:
        # A settled row may still contain the claim's constants, but not the time of the claim.
        claimed = constants_of(processor.claim or {})
        return Q(**claimed, **{f"{processor.claimed_at}__isnull": False})
    return None


def _key_column(processor: Definition[Any], model: type[Model]) -> Any:
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    column: Any = columns.get(processor.group_by or "")
    named = f"{processor.name}: expected group_by={processor.group_by!r} to name"
    if column is None:
        raise InvalidOption(
            f"{named} a column or a forward relation of {model._meta.label}, got no such column; "
            f"the columns are {', '.join(f.name for f in model._meta.concrete_fields)}."
        )
    if sentence := in_parents_table(model, column):
        raise InvalidOption(f"{named} a column {sentence}")
    target = _target(column)
    collation = getattr(target, "db_collation", None)
    if not isinstance(target, KINDS) or isinstance(target, DateTimeField) or collation:
        kind = f"a {type(target).__name__}{f' with db_collation={collation!r}' * bool(collation)}"
        raise InvalidOption(
            f"{named} a column of whole numbers, UUIDs, dates, booleans or texts without a "
            f"collation of their own, where equal keys have one spelling, got {kind}; name another "
            "column."
        )
    return column


def _target(field: Any) -> Any:
    while field.remote_field:
        field = field.target_field
    return field
