"""Collects tallies in this process, by looking on at its runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence

from dcl_processor import steady as time
from dcl_processor.log_fields import Running
from dcl_processor.observers import Handling, Observer
from dcl_processor.report import Report

from .tally import OUTCOMES, Tally


def succeeded(report: Report) -> bool:
    """Return whether a run succeeded: it could start rows, and no row failed for good."""
    is_held_back = report.stopped in {"failures", "paused", "breaker", "throttled", "busy"}
    return report.failed == report.to_retry and report.error is None and not is_held_back


class Collector(Observer):
    """The tallies of the processors that ran in this process, or in those that it has started.

    ``names``: processors that are to have a tally before anything happens. ``is_share``: runs here
    are parts of a run, whose success is not known in this process.
    """

    def __init__(self, names: Iterable[str] = (), *, is_share: bool = False) -> None:
        self._is_share = is_share
        self._lock = threading.Lock()
        self._tallies = {name: Tally() for name in names}

    def _of(self, name: str) -> Tally:
        found = self._tallies.get(name)
        if found is None:
            found = self._tallies[name] = Tally()
        return found

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        with self._lock:
            for each in ages:
                self._of(name).age.add(each)

    def unlocked(self, name: str, seconds: float) -> None:
        with self._lock:
            self._of(name).lock.add(seconds)

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:  # noqa: ARG002  # as in Observer
        call = handling.call
        if call.duration is not None:
            with self._lock:
                self._of(call.label).handler.add(call.duration)

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        with self._lock:
            tally = self._of(name)
            if outcome in OUTCOMES:
                tally.rows[outcome] += 1
            else:
                tally.lost_leases += 1
            tally.retries += is_retried

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if error is None and not self._is_share and succeeded(report):
            with self._lock:
                self._of(running.name).last_success = time.time()

    def add(self, name: str, tally: Tally) -> None:
        """Add what another process counted, or what was taken and could not be passed on."""
        with self._lock:
            self._of(name).merge(tally)

    def snapshot(self) -> Mapping[str, Tally]:
        """Return a copy of all tallies, by the processors' names."""
        with self._lock:
            return copy.deepcopy(self._tallies)

    def take(self) -> Mapping[str, Tally]:
        """Return what was counted since the last call, and set the counts to zero."""
        with self._lock:
            taken, self._tallies = self._tallies, {}
        return taken
