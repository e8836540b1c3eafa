"""Stage 5: the report, a value with what a run did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dcl_processor.report.errors import represent, shown, shown_traceback
from dcl_processor.report.exceptions import RowsFailed

#: Why a run ended: "drained", "limit", "timeout", "signal", "failures" or "busy"; or the reason of
#: a gate, such as "paused".
Stopped = str

#: The last words of a report's line, where these are not "stopped by …".
_ENDS = {
    "drained": "",
    "busy": "; all slots of max_in_flight are taken",
    "paused": "; paused",
    "throttled": "; throttled",
}

#: The most rows that are counted for people: to count a forgotten table's backlog takes minutes.
MOST_COUNTED = 10_000

#: The outcomes of rows that a handler was called for, as ``row_finished`` has them; and all counts.
TRIED = ("processed", "failed", "discarded", "snoozed")
COUNTS = (*TRIED, "skipped", "stale", "lease_lost", "held")


@dataclass(frozen=True, slots=True)
class Failure:
    """One row that failed: its primary key, the error, and the traceback as text.

    With a ``retry``: ``attempt``, the attempt's number from 1, or ``None`` if it is not counted;
    ``max_attempts``, or ``None`` without a limit; and ``again_in``, the seconds until the row is
    tried again, or ``None`` if it was given up on.
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
        if self.attempt is None and self.again_in is None:
            return ""
        number = "" if self.attempt is None else f"attempt {self.attempt}"
        of = "" if self.max_attempts is None else f" of {self.max_attempts}"
        then = "given up" if self.again_in is None else f"again in {self.again_in:.0f} s"
        return f" ({', '.join(filter(None, [number + of, then]))})"

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as plain values; the error is given by its ``repr()``.

        Secrets in both texts are masked; the error has up to 2,000 characters in one line, the
        traceback up to 20,000.
        """
        return {
            "pk": plain(self.pk),
            "error": shown(represent(self.error)),
            "traceback": shown_traceback(self.traceback),
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "again_in": self.again_in,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run of a processor did.

    Counts are rows. ``processed``: handled and settled. ``failed``: the handler or its
    transaction raised; the row is as it was before, or has the values of ``failed`` and ``retry``,
    or is in doubt. ``skipped``: still pending at the end, and
    locked by another session. ``stale``: gone, or finished by another worker since it was read,
    which is no problem. ``duration`` is in seconds. ``stopped``: what ended the run.
    ``failures``: the first 100.

    ``to_retry``: the failed rows that are to be tried again, by a ``retry``.

    ``redone``: rows whose handler was called once more in this run, because the work for their
    batch was rolled back, or their call of ``process_batch()`` raised.

    ``discarded``: the handler raised ``Discard``. ``snoozed``: it raised ``Snooze``.
    ``lease_lost``: another worker took the row over before it could be settled.

    ``held``: with ``group_by``, rows that may be tried and were not, because another row of their
    key comes first or is in flight: it failed, waits, is locked, leased or in doubt. Counted at the
    end, up to 10,000.

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
    to_retry: int = 0
    redone: int = 0
    held: int = 0
    passes: int = 0
    duration: float = 0.0
    stopped: Stopped = "drained"
    error: BaseException | None = None
    failures: Sequence[Failure] = field(default=(), repr=False)

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
        """Return the report as plain values that ``json.dumps()`` accepts; errors are masked."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {
            "name": self.name,
            **counts,
            "to_retry": self.to_retry,
            "redone": self.redone,
            "passes": self.passes,
            "duration": round(self.duration, 6),
            "stopped": self.stopped,
            "error": None if self.error is None else shown(represent(self.error)),
            "ok": self.ok,
            "failures": [failure.as_dict() for failure in self.failures],
        }

    def __str__(self) -> str:
        """Return the report in one line, without counts that are 0, and without ``stale``."""
        counts = [
            f"{n} {name}"
            for name in (*COUNTS, "redone")
            if name != "stale" and (n := getattr(self, name))
        ]
        nothing = "all rows done by other workers" if self.stale else "nothing pending"
        did = ", ".join(counts) or (nothing if self.stopped == "drained" else "no row tried")
        return f"{self.name}: {did} in {self.duration:.2f} s{self._end}"

    @property
    def _end(self) -> str:
        return _ENDS.get(self.stopped, f"; stopped by {self.stopped}")


def counted(number: int) -> str:
    """Write a number of rows that was counted up to ``MOST_COUNTED``."""
    return f"{MOST_COUNTED}+" if number > MOST_COUNTED else str(number)


def plain(pk: Any) -> Any:
    return pk if pk is None or isinstance(pk, int | str) else str(pk)
