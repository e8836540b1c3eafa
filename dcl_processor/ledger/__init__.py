"""The ledger: pauses and rates that all machines keep together, and what runs and operators did.

An app of its own: add ``"dcl_processor.ledger"`` to ``INSTALLED_APPS``, and migrate. Without it no
processor sends a query for any of this. The functions here are for code; ``manage.py processors``
has the same as actions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcl_processor.ledger.switch import is_on, record

if TYPE_CHECKING:
    from dcl_processor.ledger.control import pause, resume
    from dcl_processor.ledger.models import ALL, Record, alias
    from dcl_processor.ledger.records import history, prune
    from dcl_processor.ledger.standing import Pause, State, state, states

__all__ = ["ALL", "Pause", "Record", "State", "alias", "history", "is_on", "pause", "prune"]
__all__ += ["record", "resume", "state", "states"]

_PUBLIC = {
    "models": ["ALL", "Record", "alias"],
    "control": ["pause", "resume"],
    "records": ["history", "prune"],
    "standing": ["Pause", "State", "state", "states"],
}


def __getattr__(name: str) -> Any:
    # Imported with its first use, because Django imports this module before there are models.
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
