"""Let a ``save()`` leave the lease of a held row as it is in the row.

An instance has the lease of the time when it was loaded, or none. Written back, it would have
lapsed since, or be that of a worker that has lost the row to another one. So while a worker of this
process holds a row, each ``save()`` of it writes to the column what the column has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.db.models import F, Field

#: Returns whether the row of an instance is held.
Holds = Callable[[Any], bool]

_lock = threading.Lock()
_holders: dict[Field[Any, Any], list[Holds]] = {}


def leave_alone(field: Field[Any, Any], holds: Holds) -> None:
    """Let saves leave this column alone in the rows that are held, until ``write_again()``."""
    with _lock:
        # A new list, because another thread may be at a save.
        _holders[field] = [*_holders.get(field, ()), holds]
        # Where ``save()`` asks for what it writes to the column.
        vars(field)["pre_save"] = lambda instance, add: _written(field, instance, add=add)


def write_again(field: Field[Any, Any], holds: Holds) -> None:
    """Undo ``leave_alone()``."""
    with _lock:
        others = [each for each in _holders.get(field, ()) if each != holds]
        if others:
            _holders[field] = others
        else:
            _holders.pop(field, None)
            vars(field).pop("pre_save", None)


def _written(field: Field[Any, Any], instance: Any, *, add: bool) -> Any:
    for holds in _holders.get(field, ()):
        if not add and holds(instance):
            return F(field.attname)
    return type(field).pre_save(field, instance, add)
