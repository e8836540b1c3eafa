"""Stage 5: the report, a value with what a run did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .errors import represent
from .exceptions import RowsFailed

Stopped = Literal["drained", "limit", "timeout", "signal", "failures"]

COUNTS = ("processed", "failed", "discarded", "snoozed", "skipped", "stale", "lease_lost", "held")


@dataclass(frozen=True, slots=True)
class Failure:
    """One row that failed: its primary key, the error, and the traceback as text.

    With a ``retry``: ``attempt``, the attempt's number from 1; ``max_attempts``; and ``again_in``,
    the seconds until the row is tried again, or ``None`` if it was given up on.
    """

    pk: Any
    error: BaseException
    traceback: str
    attempt: int | None = None
    max_attempts: int | None = None
    again_in: float | None = None

    @property
    def is_final(self) -> bool:
        """False if the row is to be tried again, at a time that is stored in the row."""
        return self.again_in is None

    @property
    def attempts(self) -> str:
        """Return which attempt it was, and what follows; an empty string without a ``retry``."""
        if self.attempt is None:
            return ""
        then = "given up" if self.again_in is None else f"again in {self.again_in:.0f} s"
        return f" (attempt {self.attempt} of {self.max_attempts}, {then})"

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as plain values; the error is given by its ``repr()``."""
        pk = self.pk if isinstance(self.pk, int | str) else str(self.pk)
        return {
            "pk": pk,
            "error": represent(self.error),
            "traceback": self.traceback,
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "again_in": self.again_in,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run of a processor did.

    Counts are rows. ``processed``: handled and settled. ``failed``: the handler or its
    transaction raised; the row is as it was before. ``skipped``: still pending at the end, and
    locked by another session. ``stale``: gone, or finished by another worker since it was read,
    which is no problem. ``duration`` is in seconds. ``stopped``: what ended the run.
    ``failures``: the first 100.

    ``retried``: the failed rows that are to be tried again, by a ``retry``.

    ``discarded``: the handler raised ``Discard``. ``snoozed``: it raised ``Snooze``.
    ``lease_lost``: another worker took the row over before it could be settled.

    ``held``: with ``group_by``, rows that may be tried and were not, because another row of their
    key comes first or is in flight: it failed, waits, is locked, leased or in doubt. Counted at the
    end, up to 10,000. ``held_keys``: the first 10 of their keys.

    ``error``: why the handler's resource could not be opened. No row caused it, and none failed.
    """

    name: str
    processed: int = 0
    failed: int = 0
    discarded: int = 0
    snoozed: int = 0
    skipped: int = 0
    stale: int = 0
    lease_lost: int = 0
    retried: int = 0
    held: int = 0
    passes: int = 0
    duration: float = 0.0
    stopped: Stopped = "drained"
    error: BaseException | None = None
    failures: Sequence[Failure] = field(default=(), repr=False)
    held_keys: Sequence[Any] = ()

    @property
    def ok(self) -> bool:
        """True if no row failed and failures did not end the run."""
        return self.failed == 0 and self.stopped != "failures"

    @property
    def did_something(self) -> bool:
        """True unless no row was pending, or other workers had finished all pending rows."""
        return any(getattr(self, name) for name in COUNTS if name != "stale")

    def raise_for_failures(self) -> Self:
        """Return the report, or raise ``RowsFailed`` from the first row's error, or ``error``.

        It is named after ``raise_for_status()`` in HTTP clients, and works like it.
        """
        if self.ok:
            return self
        raise RowsFailed(self) from (self.failures[0].error if self.failures else self.error)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values that ``json.dumps()`` accepts."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {
            "name": self.name,
            **counts,
            "retried": self.retried,
            "passes": self.passes,
            "duration": round(self.duration, 6),
            "stopped": self.stopped,
            "error": None if self.error is None else represent(self.error),
            "ok": self.ok,
            "held_keys": [
                key if isinstance(key, int | str) else str(key) for key in self.held_keys
            ],
            "failures": [failure.as_dict() for failure in self.failures],
        }

    def __json__(self) -> dict[str, Any]:
        """Return ``as_dict()``: kombu, Celery's serialiser, looks for this method."""
        return self.as_dict()

    def __str__(self) -> str:
        """Return the report in one line, without counts that are 0."""
        counts = [f"{n} {name}" for name in COUNTS if (n := getattr(self, name))]
        did = ", ".join(counts) or (
            "nothing pending" if self.stopped == "drained" else "no row tried"
        )
        end = "" if self.stopped == "drained" else f"; stopped by {self.stopped}"
        return f"{self.name}: {did} in {self.duration:.2f} s{end}"
