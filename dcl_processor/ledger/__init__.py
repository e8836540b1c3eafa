"""The ledger: pauses, orders and limits that all machines keep together, and what runs have done.

An app of its own: add ``"dcl_processor.ledger"`` to ``INSTALLED_APPS``, and migrate. Without it no
processor sends a query for any of this. The functions here are for code; ``manage.py processors``
has the same as actions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .orders import ALL, pause, resume
    from .records import RecordedAction, State, actions, history, prune, state, states

__all__ = [
    "ALL",
    "RecordedAction",
    "State",
    "actions",
    "history",
    "pause",
    "prune",
    "resume",
    "state",
    "states",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported when it is used, because Django imports this module before there are models.
    module = "orders" if name in {"ALL", "pause", "resume"} else "records"
    return getattr(import_module(f"{__name__}.{module}"), name)
