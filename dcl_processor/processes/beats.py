"""What a worker is at: the beat that it sends to its parent each second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from dcl_processor import steady as time
from dcl_processor.errors import printable
from dcl_processor.execution.calls import Call, under_way
from dcl_processor.execution.in_flight import Death

#: Rows that are named, and the characters of a key and of a processor's name. So a beat is shorter
#: than 4,096 bytes, and a pipe has room for several.
MOST_ROWS, LONGEST = 5, 100

#: Seconds after which a worker counts as at work in a call that is no handler's.
NOTICED_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class AtWork:
    """A call of a handler; ``number``: of its rows, of which ``keys`` has the first, as text.

    ``since``: its beginning, by the monotonic clock, which processes share. ``limit``: its
    ``handler_timeout`` in seconds, if it has one. ``identity``: recognises all of its rows.
    ``what``: what is called instead of the handler.
    """

    label: str
    keys: tuple[str, ...]
    number: int
    since: float
    limit: float | None
    identity: bytes = b""
    what: str = ""

    @classmethod
    def of(cls, call: Call) -> AtWork:
        """Return what is to be known of a call in another process."""
        return replace(cls._at(call.label, call.keys, call.since, call.limit), what=call.what)

    @classmethod
    def noted(cls, notes: Sequence[Death]) -> AtWork | None:
        """Return what a process is at by its notes, if it has any."""
        if not notes:
            return None
        keys = [key for note in notes for key in note.keys]
        return cls._at("", keys, min(_began(note) for note in notes), None)

    @classmethod
    def _at(cls, label: str, keys: Sequence[Any], since: float, limit: float | None) -> AtWork:
        texts = [_text(key) for key in keys]
        first = tuple(text[:LONGEST] for text in texts[:MOST_ROWS])
        identity = blake2b("\0".join(texts).encode(errors="replace"), digest_size=16).digest()
        return cls(label[:LONGEST], first, len(texts), since, limit, identity)

    def __str__(self) -> str:
        return f"{self.named} since {clock(self.since)}"

    @property
    def named(self) -> str:
        """The rows in words, such as ``"row 17"``, and what is called for them if no handler is."""
        if self.what and not self.number:
            return self.what
        rows = self.rows
        more = f" and {self.number - len(rows)} more" if self.number > len(rows) else ""
        what = f"{self.what} for " if self.what else ""
        return f"{what}row{'s' * (self.number > 1)} {', '.join(rows)}{more}"

    @property
    def rows(self) -> list[str]:
        """The first of its keys, without control characters."""
        return [printable(key) for key in self.keys]

    def is_among(self, notes: Sequence[Death]) -> bool:
        """Return whether the process is at one of these rows by its notes, and has not left it."""
        return any(
            key[:LONGEST] in self.keys and _began(note) <= self.since + 1
            for note in notes
            for key in note.keys
        )

    def is_late(self, now: float, grace: float = 0.0) -> bool:
        """Return whether the call has gone on for longer than its limit and the grace."""
        return self.limit is not None and now - self.since > self.limit + grace


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; ``at``: its time, by the monotonic clock.

    ``call``: the oldest call that is late, or else the oldest one. ``is_stopping``: whether no row
    will start.
    """

    at: float
    call: AtWork | None
    is_stopping: bool = False


def most_urgent(now: float) -> AtWork | None:
    """Return the oldest call of this process that is late, or else the oldest one.

    A late call that another one keeps from being cancelled is left out: the other one is at fault.
    So is what is no handler and has just begun: a worker that is idle reads the rows now and then.
    """
    calls = [
        call
        for call in under_way()
        if not (call.is_late(now) and call.is_held_up)
        and not (call.what and now - call.since < NOTICED_AFTER)
    ]
    late = (call for call in calls if call.is_late(now))
    call = next(late, calls[0] if calls else None)
    return None if call is None else AtWork.of(call)


def clock(moment: float) -> str:
    """Return a moment of the monotonic clock as a time of day; with its day unless it is today."""
    now = datetime.now(UTC)
    at = datetime.fromtimestamp(now.timestamp() - (time.monotonic() - moment), UTC)
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def lasted(seconds: float) -> str:
    """Return a duration in words."""
    for unit, size in (("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _began(note: Death) -> float:
    """Return when a note was made, by the monotonic clock."""
    return time.monotonic() - (time.time() - note.since)


def _text(key: Any) -> str:
    try:
        return str(key)
    except Exception:  # noqa: BLE001  # a key's own __str__() is arbitrary code
        return "?"
