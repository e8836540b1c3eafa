"""The ledger: pauses and rates that all machines keep together, and what runs and operators did.

An app of its own: add ``"dcl_processor.ledger"`` to ``INSTALLED_APPS``, and migrate. Without it no
processor sends a query for any of this. The functions here are for code; ``manage.py processors``
has the same as actions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import apps as registry  # the module "apps" of this package has the name
from django.conf import settings

if TYPE_CHECKING:
    from dcl_processor.ledger.control import Pause, State, pause, resume, state, states
    from dcl_processor.ledger.models import ALL, Record, alias
    from dcl_processor.ledger.records import history, prune

__all__ = ["ALL", "Pause", "Record", "State", "alias", "history", "is_on", "pause", "prune"]
__all__ += ["record", "resume", "state", "states"]

_PUBLIC = {
    "models": ["ALL", "Record", "alias"],
    "control": ["Pause", "State", "pause", "resume", "state", "states"],
    "records": ["history", "prune"],
}

APP = "dcl_processor.ledger"


def is_on() -> bool:
    """Return whether the app is installed, and the settings leave it on."""
    return registry.is_installed(APP) and bool(getattr(settings, "DCL_PROCESSOR_LEDGER", True))


def record(processor: Any, action: str, *, by: str = "", rows: int = 0, **texts: str) -> None:
    """Record what an operator has done, if the ledger is on.

    ``processor``: a processor, its name, or ``ALL``. ``by``: default the user of this process and
    the host. ``texts``: ``keys``, ``values``, ``reason`` and ``error``. It is done already, so an
    error is logged, and not raised.
    """
    if is_on():
        from dcl_processor.ledger.records import add  # has models

        add(processor, action, by=by, rows=rows, **texts)


def __getattr__(name: str) -> Any:
    # Imported with its first use, because Django imports this module before there are models.
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
