"""``taken_over()``: called before the handler of a row whose last worker did not settle it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import Discard, Lease, Snooze
from dcl_processor.engine import heartbeat
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.marking import marking
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


def left_behind(row: Errand) -> None:
    """Leave the lease of a worker that died an hour ago."""
    before = timezone.now() - timedelta(hours=1)
    Errand.objects.filter(pk=row.pk).update(leased_until=before, attempts=1)


def shows_the_death(row: Errand) -> bool:
    """Tell whether the row shows the next worker that another one had it, and is free."""
    return Errand.objects.get(pk=row.pk).leased_until == Lease(60).taken_away


@pytest.mark.parametrize("size", [1, 10])
def test_it_is_called_before_the_handler_of_that_row_alone(size: int) -> None:
    rows = the.errands(3)
    left_behind(rows[1])
    calls: list[Any] = []
    run = the.at_least_once(
        lambda row: calls.append(row.place),
        taken_over=lambda row: calls.append(("taken over", row.place)),
        batch_size=size,
    )
    assert_run(run(), processed=3)
    assert calls == [0, ("taken over", 1), 1, 2]


def test_a_row_that_was_put_back_is_not_taken_over() -> None:
    the.errands(1)
    calls: list[Any] = []
    options = {"retry": the.retry(), "taken_over": calls.append}
    assert_run(the.at_least_once(the.raising(ValueError()), **options)(), failed=1, to_retry=1)
    assert_run(the.at_least_once(the.ignore, **options)(), processed=1)
    assert calls == []


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_row_whose_lease_lapses_during_it_is_not_handled(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended: another worker may have the row by now."""
    taken, other = the.errands(2)
    left_behind(taken)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    calls: list[Any] = []

    def look(row: Errand) -> None:
        calls.append(("taken over", row.place))
        clock.passed = HOUR

    async def handle_async(row: Errand) -> None:
        calls.append(row.place)

    handler = handle_async if is_async else lambda row: calls.append(row.place)
    run = the.at_least_once(handler, taken_over=look)
    assert_run(run(filter=the.only(taken)), lease_lost=1)
    assert calls == [("taken over", taken.place)]
    assert shows_the_death(taken)
    clock.passed = 0
    assert_run(run(filter=the.only(other)), processed=1)


NOT_NOW = [
    (Snooze(), {"retry": the.retry()}, {"snoozed": 1}, 1),
    (Snooze(), {}, {"snoozed": 1}, 1),
    (Snooze(delay=60), {}, {"failed": 1}, 1),
    (ValueError(), {"retry": the.retry()}, {"failed": 1, "to_retry": 1}, 2),
    (ValueError(), {}, {"failed": 1}, 1),
    (ValueError(), {"get_failed": lambda row, error: {}}, {"failed": 1}, 1),
    (Discard("no"), {}, {"failed": 1}, 1),
    (Discard("no"), {"retry": the.retry()}, {"failed": 1}, 2),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("make", [the.at_least_once, marking], ids=["lease", "mark"])
@pytest.mark.parametrize(("error", "options", "counts", "attempts"), NOT_NOW)
def test_it_is_called_again_if_the_row_stays_pending_by_what_it_raises(
    make: the.Make,
    error: Exception,
    options: dict[str, Any],
    counts: Any,
    attempts: int,
    is_async: bool,
) -> None:
    """Nothing was found out about the worker that died."""
    [row] = the.errands(1)
    left_behind(row)
    calls: list[str] = []

    def look(row: Errand) -> None:
        calls.append("taken over")
        if calls == ["taken over"]:
            raise error

    def handle(row: Errand) -> None:
        calls.append("handled")

    async def handle_async(row: Errand) -> None:
        handle(row)

    options = {"retry": None, "taken_over": look, **options}
    run = make(handle_async if is_async else handle, **options)
    assert_run(run(), **counts)
    assert calls == ["taken over"]
    assert shows_the_death(row)
    said = the.state(row)
    assert (said["attempts"], said["claimed"], said["claimed_at"]) == (attempts, False, False)
    assert_run(run(), processed=1)
    assert calls == ["taken over", "taken over", "handled"]
    assert not the.state(row)["leased_until"]
