"""The lease: how long a row is ours without a lock, and what keeps it so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import DateTimeField, Model, Q, QuerySet

from . import clock, requirements
from .exceptions import InvalidOption
from .pending import Question, these

logger = logging.getLogger("dcl_processor")


#: Seconds. A row whose copy died waits for so long, and a living copy renews its leases anyway.
LONGEST = 86_400.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Hold a row without a lock while it is handled.

    ``duration``: seconds (or a ``timedelta``), at least 1, after which another copy may take the
    row over; it is renewed at a third of that while the handler runs, so that it need not be as
    long as the work. ``field`` names a nullable ``DateTimeField`` of the model, which keeps the
    time, by the database's clock, until which the row is leased.

    The idea is Gray and Cheriton's; message queues call it a visibility timeout.
    """

    duration: float | timedelta
    _: KW_ONLY
    field: str = "leased_until"

    def __post_init__(self) -> None:
        value: Any = self.duration
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 1 <= seconds <= LONGEST:
            raise InvalidOption(
                "expected a Lease's duration to be a number of seconds from 1 to a day, or a "
                f"timedelta, got {value!r}; the renewal at a third of it has to go through in time."
            )
        if not isinstance(self.field, str):
            raise InvalidOption(f"expected a Lease's field to be a name, got {self.field!r}.")

    @property
    def seconds(self) -> float:
        value = self.duration
        return value.total_seconds() if isinstance(value, timedelta) else float(value)

    def free(self) -> Q:
        """Return the condition under which nobody holds a row."""
        lapsed = Q(**{f"{self.field}__lte": clock.DatabaseNow()})
        return Q(**{f"{self.field}__isnull": True}) | lapsed

    def check(self, model: type[Model], label: str) -> None:
        """Raise ``InvalidOption`` unless the model has a column that can keep the lease."""
        named = f"{label}: expected the Lease's field={self.field!r}"
        words = "a nullable DateTimeField"
        requirements.expect(model, self.field, DateTimeField, null=True, named=named, words=words)


class Keeper:
    """Renews the leases of one copy, in a thread and on a connection of its own."""

    def __init__(self, lease: Lease, label: str) -> None:
        self._lease = lease
        self._label = label
        self._lock = threading.Lock()
        self._question: Question[Any] | None = None
        self._tokens: dict[Any, list[datetime]] = {}
        self._alive_until: dict[Any, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, question: Question[Any], pks: Iterable[Any], token: datetime) -> None:
        """Begin to renew the leases of these rows, whose claim has been committed."""
        end = time.monotonic() + self._lease.seconds
        with self._lock:
            self._question = question
            for pk in pks:
                self._tokens[pk] = [token]
                self._alive_until[pk] = end
        # Inside Django's TestCase nothing is committed, and no other connection sees the rows.
        if self._thread is None and not connections[question.using].in_atomic_block:
            name = f"{self._label}: leases"
            self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
            self._thread.start()

    def is_ours(self, pk: Any) -> bool:
        """Tell whether the lease lives, as far as is known here."""
        return time.monotonic() < self._alive_until.get(pk, 0.0)

    def guard(self, pk: Any) -> Q:
        """Recognise a row by every value that its lease may have had from us."""
        return Q(**{f"{self._lease.field}__in": self._tokens.get(pk, [])})

    def let_go(self, pk: Any) -> Q:
        """Stop renewing a row's lease, and return what recognises it.

        Waits for a renewal that is under way: one that came between the end of the handler and
        the settlement would make the settlement miss.
        """
        with self._lock:
            guard = self.guard(pk)
            self._tokens.pop(pk, None)
            self._alive_until.pop(pk, None)
        return guard

    def close(self) -> None:
        """End the thread; leases that are still held lapse by themselves."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        try:
            while not self._stop.wait(self._lease.seconds / 3):
                with self._lock:
                    self._renew_in_time()
        finally:
            connections.close_all()

    def _renew_in_time(self) -> None:
        try:
            self._renew()
        except Exception as error:  # noqa: BLE001  # the next beat tries again, in time or not
            logger.warning("%s: the leases were not renewed: %s", self._label, error)
            for connection in connections.all(initialized_only=True):
                connection.close_if_unusable_or_obsolete()

    def _renew(self) -> None:
        question, held = self._question, list(self._tokens)
        if question is None or not held:
            return
        began = time.monotonic()
        table: QuerySet[Any] = QuerySet(question.model, using=question.using)
        token = clock.read(question, held) + timedelta(seconds=self._lease.seconds)
        known = {each for tokens in self._tokens.values() for each in tokens}
        # Noted before it is written: if the answer is lost, it may have been written all the same.
        for pk in held:
            self._tokens[pk].append(token)
        ours = table.filter(these(held), **{f"{self._lease.field}__in": known})
        renewed = ours.update(**{self._lease.field: token})
        kept = set(held)
        if renewed < len(held):
            still = table.filter(these(held), **{self._lease.field: token})
            kept = set(still.values_list("pk", flat=True))
        for pk in held:
            # Only the last two can be in the table.
            del self._tokens[pk][:-2]
            self._alive_until[pk] = began + self._lease.seconds if pk in kept else 0.0
