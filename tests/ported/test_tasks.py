"""Tasks with a priority and attempts; by hand, a function in plpgsql claims them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from dcl_processor.testing import race
from tests.ported import outside
from tests.ported.as_processor.tasks import work
from tests.ported.by_hand import tasks
from tests.ported.models import Task
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)

each_way = pytest.mark.parametrize("loop", [tasks.work, work], ids=["by hand", "as a processor"])


@pytest.fixture(autouse=True)
def claim_task(transactional_db: None) -> None:
    """Create the function of the loop by hand."""
    with connection.cursor() as cursor:
        cursor.execute(tasks.CLAIM_TASK)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep what is performed; what begins with "bad" fails."""
    performed: list[str] = []

    def perform(payload: str) -> None:
        performed.append(payload)
        if payload.startswith("bad"):
            raise ValueError(payload)

    monkeypatch.setattr(outside, "perform", perform)
    return performed


def states() -> dict[str, str]:
    return dict(Task.objects.values_list("payload", "state"))


@each_way
def test_the_highest_priority_comes_first(loop: Callable[[], Any], performed: list[str]) -> None:
    for payload, priority in {"c": 1, "a": 9, "b": 9, "d": 0}.items():
        Task.objects.create(payload=payload, priority=priority)
    loop()
    assert performed == ["a", "b", "c", "d"]
    assert set(states().values()) == {"done"}
    loop()
    assert len(performed) == 4


@each_way
def test_a_task_that_fails_is_tried_three_times_and_later_each_time(
    loop: Callable[[], Any], performed: list[str]
) -> None:
    Task.objects.create(payload="bad", priority=5)
    Task.objects.create(payload="good")
    delays = []
    for attempt in (1, 2, 3):
        loop()
        task = Task.objects.get(payload="bad")
        assert (task.attempts, task.leased_until) == (attempt, None)
        assert "ValueError" in task.last_error
        if task.next_attempt_at is not None and task.state == "queued":
            delays.append((task.next_attempt_at - timezone.now()).total_seconds())
        loop()
        Task.objects.update(next_attempt_at=None)
    assert performed == ["bad", "good", "bad", "bad"]
    assert states() == {"bad": "failed", "good": "done"}
    first, second = delays
    assert 30 < first <= 66 < second <= 132


@each_way
def test_a_task_is_taken_over_when_its_lease_has_lapsed(
    loop: Callable[[], Any], performed: list[str]
) -> None:
    """A worker that died leaves its lease, and the attempt that it has counted."""
    now, hour = timezone.now(), timedelta(hours=1)
    Task.objects.create(payload="alive", attempts=1, leased_until=now + hour)
    Task.objects.create(payload="lapsed", attempts=1, leased_until=now - hour)
    Task.objects.create(payload="given up", attempts=3, leased_until=now - hour)
    loop()
    assert performed == ["lapsed"]
    assert states() == {"alive": "queued", "lapsed": "done", "given up": "failed"}


@each_way
def test_workers_together_perform_each_task_once(
    loop: Callable[[], Any], performed: list[str]
) -> None:
    Task.objects.bulk_create(Task(payload=f"{number}") for number in range(15))
    together(loop)
    assert sorted(performed, key=int) == [f"{number}" for number in range(15)]
    assert set(states().values()) == {"done"}


def test_in_a_race_of_processors_each_task_is_performed_once(performed: list[str]) -> None:
    Task.objects.bulk_create(Task(payload=f"{number}") for number in range(3))
    race(work, copies=3).raise_for_failures()
    assert sorted(performed) == ["0", "1", "2"]
