"""The delivery guarantees of a processor, the rules of each, and the lease that one needs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db.models import DateTimeField, Model, Q

from dcl_processor import clock
from dcl_processor.values import DAY, expect_seconds, expect_type, seconds

from .model_columns import expect_column

if TYPE_CHECKING:
    from .definition import Definition


class Delivery(StrEnum):
    """What a crash does to a row.

    ``TRANSACTIONAL``: lock and ask again → work → flip → commit. Work in the same database
    happens exactly once; an effect outside it, such as an e-mail, may be repeated when the
    process dies between the effect and the commit.

    ``AT_MOST_ONCE``: lock and ask again → claim or flip → commit → work. Nothing is repeated; a
    row whose process died stays claimed, for a person to look at.

    ``AT_LEAST_ONCE``: lock and ask again → lease → commit → work → flip if this worker still has
    the lease. Another worker takes over a row whose process died when its lease has lapsed.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a delivery allows and needs.

    ``options``: those of ``claim``, ``claimed_at`` and ``lease`` that it uses; any other one is
    refused, ``claim`` may be left out, and ``lease`` may not. ``in_transaction``: its handlers work
    in the transaction that has the lock, so they cannot be asynchronous, and the row of a process
    that died is as it was. ``marked_by``: the options of which the first that is given is written
    to a row before its handler is called, and takes it out of ``pending``.
    """

    options: frozenset[str] = frozenset()
    in_transaction: bool = False
    marked_by: tuple[str, ...] = ()


#: Each delivery has a line here, and a function in ``engine/deliveries.py``.
RULES: dict[str, Rules] = {
    Delivery.TRANSACTIONAL: Rules(in_transaction=True),
    Delivery.AT_MOST_ONCE: Rules(frozenset({"claim", "claimed_at"}), marked_by=("claim", "done")),
    Delivery.AT_LEAST_ONCE: Rules(frozenset({"claim", "claimed_at", "lease"})),
}


def rules_of(processor: Definition[Any]) -> Rules:
    """Return the rules of a processor's delivery."""
    return RULES[processor.delivery]


# --- the lease: how long a worker holds a row without a lock, and what renews it


#: Seconds. A row whose worker died waits this long, and a living worker renews its leases anyway.
LONGEST = DAY

#: The end of a lease that was taken away, in UTC, or with ``USE_TZ=False`` in local time.
TAKEN_AWAY = datetime(2000, 1, 1)  # noqa: DTZ001  # the zone depends on the settings


def was_taken_away(time: datetime) -> bool:
    """Return whether a lease that ends at this time, in any zone, was taken away."""
    return time.year <= TAKEN_AWAY.year


@dataclass(frozen=True, slots=True)
class Lease:
    """Hold a row without a lock while it is handled.

    ``duration``: seconds (or a ``timedelta``), at least 1, after which another worker may take the
    row over. The lease is renewed at a third of that while the handler runs, so that it need not be
    as long as the work. ``field`` names a nullable ``DateTimeField`` of the model, which keeps the
    end of the lease, by the database's clock.

    The idea is Gray and Cheriton's; message queues call it a visibility timeout.
    """

    duration: float | timedelta
    _: KW_ONLY
    field: str = "leased_until"

    def __post_init__(self) -> None:
        expect_seconds(
            "expected a Lease's duration",
            self.duration,
            least=1,
            most=LONGEST,
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

    @property
    def taken_away(self) -> datetime:
        """The time of a lease that was taken away from a worker that did not settle its row.

        It has lapsed, no worker ever writes it as a token, and it shows the next worker that
        another one had the row.
        """
        return TAKEN_AWAY.replace(tzinfo=UTC if settings.USE_TZ else None)

    def in_flight(self) -> Q:
        """Return the condition under which a worker may settle a row, or renew its lease."""
        return Q(**{f"{self.field}__gt": self.taken_away})

    def held(self) -> Q:
        """Return the condition under which a worker holds a row, or died while it did."""
        return Q(**{f"{self.field}__isnull": False})

    def alive(self) -> Q:
        """Return the condition under which no other worker takes a row over yet."""
        return Q(**{f"{self.field}__gt": clock.DatabaseNow()})

    def check(self, model: type[Model], label: str) -> None:
        """Raise ``InvalidOption`` unless the model has a column that can keep the lease."""
        named = f"{label}: expected the Lease's field={self.field!r}"
        words = "a nullable DateTimeField"
        expect_column(model, self.field, DateTimeField, null=True, named=named, words=words)
