"""The delivery guarantees of a processor, and the lease that one of them needs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from enum import StrEnum

from django.db.models import Q

from dcl_processor.pending import clock
from dcl_processor.report.values import DAY, expect_seconds, expect_type, seconds


class Delivery(StrEnum):
    """What a crash does to a row.

    ``TRANSACTIONAL``: lock and ask again → work → flip → commit. ``AT_MOST_ONCE``: lock and ask
    again → claim or flip → commit → work. ``AT_LEAST_ONCE``: lock and ask again → lease → commit →
    work → flip if this worker still has the lease.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


#: Of ``claim``, ``claimed_at`` and ``lease``, the options that a delivery uses.
USES: dict[str, frozenset[str]] = {
    Delivery.TRANSACTIONAL: frozenset(),
    Delivery.AT_MOST_ONCE: frozenset({"claim", "claimed_at"}),
    Delivery.AT_LEAST_ONCE: frozenset({"claim", "claimed_at", "lease"}),
}


@dataclass(frozen=True, slots=True)
class Lease:
    """Hold a row without a lock while it is handled.

    ``duration``: seconds (or a ``timedelta``), at least 1, after which another worker may take the
    row over. The lease is renewed at a third of that while the handler runs, so that it need not be
    as long as the work. ``field`` names a nullable ``DateTimeField`` of the model, which keeps the
    end of the lease, by the database's clock.
    """

    duration: float | timedelta
    _: KW_ONLY
    field: str = "leased_until"

    def __post_init__(self) -> None:
        expect_seconds(
            "expected a Lease's duration",
            self.duration,
            least=1,
            most=DAY,
            fix="; the heartbeat renews a lease after a third of it",
        )
        expect_type("expected a Lease's field", self.field, str, "a name")

    @property
    def seconds(self) -> float:
        return seconds(self.duration)

    def free(self) -> Q:
        """Return the condition under which no worker holds a row."""
        lapsed = Q(**{f"{self.field}__lte": clock.DatabaseNow()})
        return Q(**{f"{self.field}__isnull": True}) | lapsed

    def alive(self) -> Q:
        """Return the condition under which no other worker takes a row over yet."""
        return Q(**{f"{self.field}__gt": clock.DatabaseNow()})
