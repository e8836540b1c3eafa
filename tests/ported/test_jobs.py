"""Jobs with a limit for each kind, a worker's name, and attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import Lease, Retry
from dcl_processor.testing import race
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.ported import outside
from tests.ported.as_processor.jobs import Work, work
from tests.ported.by_hand import jobs
from tests.ported.models import Job
from tests.ported.workers import renewed, together

pytestmark = pytest.mark.django_db(transaction=True)

each_way = pytest.mark.parametrize("loop", [jobs.work, work], ids=["by hand", "as a processor"])


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep what is performed."""
    performed: list[str] = []
    monkeypatch.setattr(outside, "perform", performed.append)
    return performed


def add(*kinds: str, **values: Any) -> None:
    """Make a job for each kind; its payload is its kind, and a number."""
    Job.objects.bulk_create(
        Job(kind=kind, payload=f"{kind} {number}", **values) for number, kind in enumerate(kinds)
    )


def states() -> set[str]:
    return set(Job.objects.values_list("state", flat=True))


@each_way
def test_no_more_jobs_of_a_kind_run_than_its_limit(
    loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add("mail", "mail", "mail", "print")
    started, printed, go_on = Event(), Event(), Event()
    running: list[str] = []

    def perform(payload: str) -> None:
        kind = payload.partition(" ")[0]
        running.append(kind)
        if kind == "print":
            printed.set()
        if kind == "mail" and running.count("mail") <= 2:
            if running.count("mail") == 2:
                started.set()
            the.wait(go_on)

    monkeypatch.setattr(outside, "perform", perform)
    with the.meanwhile(lambda: together(loop, 3)):
        try:
            the.wait(started)
            marked = Job.objects.filter(state="running", worker=outside.worker())
            assert marked.filter(kind="mail", attempts=1).count() == 2
            loop()
            the.wait(printed)  # by this loop, or by the third worker, which may have it claimed
            assert sorted(running) == ["mail", "mail", "print"]
        finally:
            go_on.set()
    loop()
    assert sorted(running) == ["mail", "mail", "mail", "print"]
    assert states() == {"done"}


@each_way
def test_a_job_is_tried_three_times_and_taken_over(loop: Callable[[], Any]) -> None:
    ago = timezone.now() - timedelta(hours=1)
    add("mail", state="running", attempts=1, leased_until=ago)
    for attempts, state in ((2, "new"), (3, "failed")):
        loop()
        Job.objects.update(next_attempt_at=None)
        job = Job.objects.get()
        assert (job.attempts, job.state, job.leased_until) == (attempts, state, None)
        assert "ConnectionError" in job.last_error


@each_way
def test_workers_together_perform_each_job_once(
    loop: Callable[[], Any], performed: list[str]
) -> None:
    add(*["mail", "print", "scan"] * 4)
    together(loop)
    loop()
    assert sorted(performed) == sorted(Job.objects.values_list("payload", flat=True))
    assert states() == {"done"}


def test_in_a_race_of_processors_each_job_is_performed_once(performed: list[str]) -> None:
    add("mail", "print", "scan")
    race(work, copies=3).raise_for_failures()
    assert sorted(performed) == ["mail 0", "print 1", "scan 2"]


def test_four_workers_never_have_more_than_two_jobs_of_a_kind_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thirds of the jobs are of one kind, and some fail once: none is lost, none is twice."""
    log: list[tuple[int, str]] = []  # a beginning is 1, an end is -1; only appended to
    failed: set[str] = set()

    def perform(payload: str) -> None:
        log.append((1, payload))
        try:
            if payload.endswith("7") and payload not in failed:
                failed.add(payload)
                raise ValueError(payload)
        finally:
            log.append((-1, payload))

    monkeypatch.setattr(outside, "perform", perform)
    add(*["mail", "mail", "mail", "mail", "print", "scan"] * 10)
    at_once = Work(retry=Retry(3, backoff=0))
    together(at_once, workers=4)
    while Job.objects.filter(state="new").exists():
        at_once()
    assert states() == {"done"}
    began = Counter(payload for step, payload in log if step == 1)
    assert len(failed) == 6
    assert began == {payload: 2 if payload in failed else 1 for payload in began}
    assert len(began) == 60
    in_flight = Counter[str]()
    for step, payload in log:
        kind = payload.partition(" ")[0]
        in_flight[kind] += step
        assert 0 <= in_flight[kind] <= 2, (payload, in_flight)


def during_two_jobs(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any], third: Callable[[], Any]
) -> list[str]:
    """Run a third worker while two perform jobs of one kind; return what was begun until then."""
    add("mail", "mail", "mail")
    both, go_on = Event(), Event()
    begun: list[str] = []

    def perform(payload: str) -> None:
        begun.append(payload)
        if len(begun) <= 2:
            if len(begun) == 2:
                both.set()
            the.wait(go_on)

    monkeypatch.setattr(outside, "perform", perform)
    with the.meanwhile(lambda: together(loop, 2)):
        try:
            the.wait(both)
            third()
            until_then = sorted(begun)
        finally:
            go_on.set()
    return until_then


def test_by_hand_slow_jobs_are_performed_again_and_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop does not renew its leases, so five jobs of the kind are performed at once."""

    def third() -> None:
        # What the clock does while the two are slow.
        ago = timezone.now() - timedelta(seconds=1)
        Job.objects.filter(state="running").update(leased_until=ago)
        jobs.work()

    begun = during_two_jobs(monkeypatch, jobs.work, third)
    assert begun == ["mail 0", "mail 0", "mail 1", "mail 1", "mail 2"]


def test_a_processor_counts_slow_jobs_and_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Work(lease=Lease(6))

    def third() -> None:
        for job in Job.objects.filter(state="running"):
            renewed(job)
        assert_run(slow(wait_for_locked=0), held=1)

    assert during_two_jobs(monkeypatch, slow, third) == ["mail 0", "mail 1"]
    slow()
    assert states() == {"done"}


def died_in_the_last_attempt() -> None:
    ago = timezone.now() - timedelta(hours=1)
    add("mail", state="running", attempts=3, leased_until=ago)


def test_by_hand_a_job_whose_worker_died_in_its_last_attempt_runs_for_good(
    performed: list[str],
) -> None:
    """No worker takes it, and its state says "running"."""
    died_in_the_last_attempt()
    jobs.work()
    assert (states(), performed) == ({"running"}, [])


def test_a_processor_gives_up_a_job_whose_worker_died_in_its_last_attempt(
    performed: list[str],
) -> None:
    died_in_the_last_attempt()
    assert work().failed == 1
    assert (states(), performed) == ({"failed"}, [])
