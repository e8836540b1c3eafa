"""What the supervisor reports of its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcl_processor.diagnosis import Trouble
from dcl_processor.watch.watch import Event

from .beats import AtWork


@dataclass(frozen=True, slots=True)
class Died:
    """A worker has died, or did not start.

    ``wait``: seconds until its restart, ``None`` without one. ``call``: the rows that it was at,
    by its last beat.
    """

    trouble: Trouble
    wait: float | None
    call: AtWork | None = None

    def __str__(self) -> str:
        at = ""
        if self.call is not None:
            at = f", last seen at {self.call}{f' of {self.call.label}' * bool(self.call.label)}"
        match self.wait:
            case None:
                again = ""
            case 0:
                again = "; it is started again"
            case wait:
                again = f"; it is started again in {wait:.1f} s"
        return f"{self.trouble.sentence}{at}{again}"


@dataclass(frozen=True, slots=True)
class Finishing:
    """A worker that is to stop finishes these rows first."""

    call: AtWork


News = Event | Died | Finishing

#: Takes a worker's number, a processor's name (``None``: the worker itself), and what happened.
Tell = Callable[[int, str | None, News], None]


# --- the state of each worker of a command, as it is shown outside


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker now; ``pid``: of its process, if there is one; ``state``: in words.

    ``call``: what it was at when it last sent a beat. ``is_alive``: whether it has moved lately,
    and is in no handler that should have ended.
    """

    number: int
    pid: int | None
    state: str
    call: AtWork | None
    is_alive: bool


#: Takes the workers of this command that have not ended.
Observe = Callable[[Sequence[Worker]], None]
