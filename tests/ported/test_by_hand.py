"""Loops by hand whose processors need options that are not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import Event

import pytest
from django.utils import timezone

from tests.contract.support import errands as the
from tests.ported import outside
from tests.ported.by_hand import jobs, prices
from tests.ported.models import Job, Price
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)


def test_each_price_has_a_result_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "TOGETHER", 2)
    calls: list[list[tuple[str, int]]] = []

    def mutate(changes: Sequence[tuple[str, int]]) -> list[str | None]:
        calls.append(list(changes))
        return [None if amount > 0 else "must be above 0" for _, amount in changes]

    monkeypatch.setattr(outside, "mutate", mutate)
    for number, amount in enumerate([5, 0, 7]):
        Price.objects.create(sku=f"{number}", amount=amount)
    prices.push_prices()
    assert calls == [[("0", 5), ("1", 0)], [("2", 7)]]
    assert dict(Price.objects.values_list("sku", "state")) == {
        "0": "shown",
        "1": "new",
        "2": "shown",
    }
    for _ in range(3):
        Price.objects.update(next_attempt_at=None)
        prices.push_prices()
    refused = Price.objects.get(sku="1")
    assert (refused.state, refused.attempts) == ("refused", 3)
    assert (refused.last_error, len(calls)) == ("must be above 0", 4)


def test_a_call_that_fails_costs_each_price_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    Price.objects.bulk_create(Price(sku=f"{number}", amount=1) for number in range(3))
    prices.push_prices()
    assert set(Price.objects.values_list("state", "attempts", "leased_until")) == {("new", 1, None)}


def test_workers_together_push_each_price_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "TOGETHER", 4)
    pushed: list[str] = []

    def mutate(changes: Sequence[tuple[str, int]]) -> list[str | None]:
        pushed.extend(sku for sku, _ in changes)
        return [None] * len(changes)

    monkeypatch.setattr(outside, "mutate", mutate)
    Price.objects.bulk_create(Price(sku=f"{number}", amount=1) for number in range(20))
    together(prices.push_prices)
    assert sorted(pushed, key=int) == [f"{number}" for number in range(20)]


def test_no_more_jobs_of_a_kind_run_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("mail", "mail", "mail", "print"):
        Job.objects.create(kind=kind, payload=kind)
    started, go_on = Event(), Event()
    running: list[str] = []

    def perform(payload: str) -> None:
        running.append(payload)
        if len(running) == 2:
            started.set()
        if len(running) <= 2:
            the.wait(go_on)

    monkeypatch.setattr(outside, "perform", perform)
    with the.meanwhile(lambda: together(jobs.work, 2)):
        try:
            the.wait(started)
            marked = Job.objects.filter(state="running", worker=outside.worker())
            assert marked.filter(kind="mail", attempts=1).count() == 2
            jobs.work()
            assert running == ["mail", "mail", "print"]
        finally:
            go_on.set()
    assert sorted(running) == ["mail", "mail", "mail", "print"]
    assert set(Job.objects.values_list("state", flat=True)) == {"done"}


def test_a_job_is_tried_three_times_and_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ago = timezone.now() - timedelta(hours=1)
    Job.objects.create(kind="mail", payload="a", state="running", attempts=1, leased_until=ago)
    for attempts, state in ((2, "new"), (3, "failed")):
        jobs.work()
        Job.objects.update(next_attempt_at=None)
        job = Job.objects.get()
        assert (job.attempts, job.state, job.leased_until) == (attempts, state, None)
        assert job.last_error == "ConnectionError()"
