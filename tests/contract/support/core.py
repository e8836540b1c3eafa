"""The core of the contract: a healthy row is handled once, and the next run handles what is left.

Rows are those of ``tests.kinds``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Discard, Lease, Retry, batch_processor
from tests.contract.support.reports import assert_run
from tests.kinds.models import Kind

#: The states of a row, which a column of another type spells in its own way.
STATES = {"open": "open", "running": "running", "done": "done", "dead": "dead"}

#: By its name, the options of a delivery for rows in these states.
DELIVERIES: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "transactional": lambda _: {},
    "claim": lambda states: {"delivery": Delivery.AT_MOST_ONCE, **_claim(states)},
    "lease": lambda _: {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)},
    "claim and lease": lambda states: {**DELIVERIES["lease"](states), **_claim(states)},
}
each_delivery = pytest.mark.parametrize("delivery", DELIVERIES)
three_deliveries = pytest.mark.parametrize("delivery", ["transactional", "claim", "lease"])
each_size = pytest.mark.parametrize("size", [1, 10])

#: How many rows, and the places of the one that fails, and of the one that is discarded.
NUMBER, BAD, DISCARDED = 13, 4, 7


def _claim(states: dict[str, str]) -> dict[str, Any]:
    mark, reset = {"state": states["running"]}, {"state": states["open"]}
    return {"claim": mark, "claimed_at": "claimed_at", "reset": reset}


class Core:
    """Two runs over the rows of a model.

    ``calls``: the places of the rows that were handled; ``act``: what the handler does.
    """

    def __init__(
        self, rows: QuerySet[Any], delivery: str, size: int, states: dict[str, str], **options: Any
    ) -> None:
        self.calls: list[int] = []
        self.act: Callable[[Any], None] = self._act
        self._every, self._states = QuerySet[Kind](rows.model), states
        given = {
            "pending": rows.filter(
                Q(state=states["open"]) | Q(state=states["running"], leased_until__isnull=False)
            ),
            "done": {"state": states["done"]},
            "failed": {"state": states["dead"]},
            "retry": Retry(3, backoff=0, jitter=0),
            "batch_size": size,
            **DELIVERIES[delivery](states),
            **options,
        }
        self.run: BatchProcessor[Any] = batch_processor(**given)(self._handle)

    def _handle(self, row: Any) -> None:
        self.calls.append(row.place)
        self.act(row)

    def _act(self, row: Any) -> None:
        row.look()
        if row.place == DISCARDED:
            raise Discard("not wanted")
        if row.place == BAD and len(self.calls) <= NUMBER:
            raise ValueError("no such place")

    def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """Run twice, and compare the calls, reports, rows and log with what shall be."""
        every, counts = self._every, {"failed": 1, "to_retry": 1, "discarded": 1, "redone": 0}
        assert_run(self.run(), processed=NUMBER - 2, **counts)  # type: ignore[arg-type]
        assert sorted(self.calls) == [*range(NUMBER)]
        [(place, error)] = every.filter(attempts=1, state=self._states["open"]).values_list(
            "place", "last_error"
        )
        assert (place, error.rstrip()) == (BAD, "ValueError: no such place")
        assert_run(self.run(), processed=1, redone=0)
        assert self.calls[NUMBER:] == [BAD]
        settled = every.filter(leased_until=None, claimed_at=None, next_attempt_at=None)
        assert settled.filter(state=self._states["done"], attempts=0).count() == NUMBER - 1
        [discarded] = settled.filter(state=self._states["dead"]).values_list("place", flat=True)
        assert discarded == DISCARDED
        # Of all that was logged, the discarded row alone is a warning.
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert [each.endswith("discarded: not wanted") for each in warnings] == [True], warnings
