"""Objects that look on while rows are handled: metrics and traces. There are none by default.

An observer belongs to an exporter, which is code of others: what it raises costs no row. Without an
observer, nothing is computed for one: the places that call it look at ``active`` first. A receiver
of the signal ``row_finished`` makes a run wait for each COMMIT, because it may use the connection
of the run; an observer may not, so that it costs no round trip.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import log_fields
from .interrupts import ends_the_run

if TYPE_CHECKING:
    from .execution.calls import Call
    from .log_fields import Running
    from .report import Report

logger = logging.getLogger("dcl_processor.operations")


class Handling:
    """One call of a handler: ``process()`` with a row, or ``process_batch()`` with several.

    ``running``: the run that it belongs to; ``None`` if it is in none. ``notes``: for observers,
    which have to find again at the end what they made at the beginning.
    """

    __slots__ = ("call", "notes", "running")

    def __init__(self, call: Call, running: Running | None) -> None:
        self.call, self.running = call, running
        self.notes: dict[Observer, Any] = {}


class Observer:
    """What an exporter may look at; each method does nothing here.

    The methods are called in the thread where it happens, several at once, and must be quick. They
    must not use the database.
    """

    def run_started(self, running: Running) -> None:
        """Note that a run begins; it may turn out that nothing is pending."""

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        """Note claimed rows; ``ages``: seconds for which each was pending, where that is known."""

    def unlocked(self, name: str, seconds: float) -> None:
        """Note the end of a transaction that held locks of rows for so many seconds."""

    def handler_started(self, handling: Handling) -> None:
        """Note that a handler is about to be called in this context."""

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:
        """Note that it has returned, or raised ``error``; called in the same context.

        Also if a receiver of ``row_started`` did not end, and the handler was not called.
        """

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        """Note the final outcome of a row: as in ``row_finished``, or ``"lease_lost"``."""

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        """Note that a run has ended; ``error``: what it raised."""

    def flush(self) -> None:
        """Send what is kept, because the process is about to end."""


#: Those that look on now. Replaced and not changed, so that other threads may go through it.
active: tuple[Observer, ...] = ()

#: The observers' methods that have raised, and were reported.
_reported: set[tuple[Observer, str]] = set()


def add(observer: Observer) -> None:
    """Let an observer look on from here; one that looks on already is not added again."""
    global active  # noqa: PLW0603  # one per process, as the registry of an exporter is
    if observer not in active:
        active = (*active, observer)


def remove(observer: Observer) -> None:
    """Let an observer look on no more."""
    global active  # noqa: PLW0603  # as above
    active = tuple(each for each in active if each is not observer)
    _reported.difference_update([each for each in _reported if each[0] is observer])


def tell(method: str, *arguments: Any, **named: Any) -> None:
    """Call a method of each observer; what one raises is reported once, and costs nothing else."""
    for each in active:
        try:
            getattr(each, method)(*arguments, **named)
        except BaseException as error:
            if ends_the_run(error):
                raise
            _report(each, method, error)


def _report(observer: Observer, method: str, error: BaseException) -> None:
    if (observer, method) in _reported:
        return
    _reported.add((observer, method))
    message = "%s.%s() raised, and what it would have recorded is missing; the run continues: %s"
    kinds = type(observer).__name__, method, type(error).__name__
    log_fields.log(logger, logging.WARNING, message, *kinds, extra={}, exc_info=error)
