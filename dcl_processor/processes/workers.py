"""The state of each worker of a command, as it is shown outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .beats import AtWork


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
