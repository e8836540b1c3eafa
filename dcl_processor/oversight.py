"""What the ledger adds to runs: whether rows may start now, and a record of what the runs do.

Nothing is added unless that app is installed: ``dcl_processor.ledger``. Without it a run starts no
thread and sends no query.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings

if TYPE_CHECKING:
    from .definition.definition import Definition

    # For the types alone: no stage imports the ledger.
    from .ledger.ledger import Ledger, Record
    from .ledger.overseer import RunOverseer
    from .report import Stopped
    from .runner.counters import Counters

    Oversight = Ledger
    Command = Record
    Overseer = RunOverseer


@dataclass(frozen=True, slots=True)
class Hold:
    """Why no row may start now.

    ``stopped``: what ended a run that does not wait. ``wait``: seconds after which rows may start,
    or the question is worth asking again; ``None``: it is not known when.
    """

    stopped: Stopped
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker of a command has done since its last message; it sends this to its parent."""

    pid: int
    counts: Mapping[str, int] = field(default_factory=dict)
    #: When the run that is under way has begun, by the monotonic clock, which processes share.
    since: float | None = None
    error: str = ""
    #: Whether the worker has ended its work, and sends no more.
    is_last: bool = False


#: The app, by its name: no stage imports it.
LEDGER = "dcl_processor.ledger"


def has_ledger() -> bool:
    """Return whether the app is installed; the settings may have switched off what runs do."""
    return apps.is_installed(LEDGER)


def installed() -> Oversight | None:
    """Return the ledger of this process, if it is installed, and the settings leave it on."""
    if not has_ledger() or not getattr(settings, "DCL_PROCESSOR_LEDGER", True):
        return None
    found: Oversight = import_module(f"{LEDGER}.ledger").ledger()
    return found


def of_run(
    processor: Definition[Any], counts: Counters, *, hands_out: bool = False
) -> Overseer | None:
    """Return the overseer of a run that begins, if there is any; ``hands_out``: of rows."""
    found = installed()
    return None if found is None else found.of_run(processor, counts, hands_out=hands_out)


def connections_of(using: str) -> int:
    """Return how many connections of the alias the app needs beside those of a run."""
    found = installed()
    return 0 if found is None else found.connections(using)


def command(kind: str, names: Collection[str]) -> AbstractContextManager[Command | None]:
    """Record the command of the block; ``kind``: "run" or "watch"."""
    found = installed()
    return nullcontext() if found is None else found.command(kind, names)


def worker(
    names: Collection[str], send: Callable[[str, Progress], None]
) -> AbstractContextManager[Command | None]:
    """Send what the worker of the block does to its parent."""
    found = installed()
    return nullcontext() if found is None else found.worker(names, send)
