"""What an operator does about rows that are in doubt, or were given up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import InvalidDone, InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def processor(handler: Any = the.ignore, **options: Any) -> BatchProcessor[Errand]:
    return the.at_most_once(handler, reset={"claimed": False}, failed={"dead": True}, **options)


def as_a_killed_process_leaves_it(*, minutes: float) -> Errand:
    since = timezone.now() - timedelta(minutes=minutes)
    return Errand.objects.create(claimed=True, claimed_at=since)


def test_in_doubt_is_what_was_claimed_for_longer_than_that() -> None:
    old, young = (as_a_killed_process_leaves_it(minutes=minutes) for minutes in (10, 1))
    Errand.objects.create()
    run = processor()
    assert list(run.in_doubt(older_than=0)) == [old, young]
    assert list(run.in_doubt(older_than=300)) == [old]
    assert list(run.in_doubt(older_than=timedelta(hours=1))) == []
    assert_run(run(), processed=1)
    assert list(run.in_doubt(older_than=0)) == [old, young]


def test_in_doubt_shows_nothing_that_was_settled() -> None:
    def handle(row: Errand) -> None:
        if row.place == 1:
            raise ValueError

    the.errands(2)
    run = processor(handle)
    run()
    assert Errand.objects.filter(claimed=True).count() == 2
    assert list(run.in_doubt(older_than=0)) == []


def test_in_doubt_counts_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    row = as_a_killed_process_leaves_it(minutes=10)
    ahead = timezone.now() + timedelta(hours=7)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    assert list(processor().in_doubt(older_than=300)) == [row]
    assert list(processor().in_doubt(older_than=3600)) == []


def test_mark_done_settles_what_is_in_doubt_and_nothing_else() -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    pending, dead = Errand.objects.create(), Errand.objects.create(claimed=True, dead=True)
    run = processor()
    assert run.mark_done(Errand.objects.all()) == 1
    said = the.state(doubtful)
    assert (said["done"], said["claimed_at"]) == (True, False)
    assert the.untouched(pending)
    assert not the.state(dead)["done"]
    assert run.mark_done(Errand.objects.all()) == 0


def test_mark_done_takes_what_in_doubt_gives() -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    run = processor()
    assert run.mark_done(run.in_doubt(older_than=60)) == 1
    assert list(run.in_doubt(older_than=0)) == []
    assert the.state(doubtful)["done"]


def test_requeue_takes_what_in_doubt_gives_and_the_row_is_handled_again() -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    handled: list[Any] = []
    run = processor(lambda row: handled.append(row.pk))
    assert_run(run())
    assert run.requeue(run.in_doubt(older_than=60)) == 1
    assert the.untouched(doubtful)
    assert_run(run(), processed=1)
    assert handled == [doubtful.pk]


def test_requeue_forgets_attempts_and_errors() -> None:
    row = Errand.objects.create(
        dead=True, claimed=True, attempts=3, last_error="ValueError", next_attempt_at=Now()
    )
    run = the.at_most_once(
        the.ignore,
        retry=the.retry(),
        reset={"claimed": False, "dead": False},
        failed={"dead": True},
    )
    assert run.requeue(Errand.objects.filter(dead=True)) == 1
    fresh = Errand.objects.get(pk=row.pk)
    assert (fresh.attempts, fresh.last_error, fresh.next_attempt_at) == (0, "", None)
    assert_run(run(), processed=1)


def test_mark_done_takes_the_values_where_they_depend_on_a_result() -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    pending = Errand.objects.create()
    run = processor(done=lambda row, result: {"done": True, "result": result})
    values = {"done": True, "result": "seen"}
    assert run.mark_done(Errand.objects.all(), values=values) == 1
    said = the.state(doubtful)
    assert (said["done"], said["result"], said["claimed_at"]) == (True, "seen", False)
    assert the.untouched(pending)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (None, InvalidOption, r"expected mark_done\(rows, values=\{…\}\) where done"),
        ({}, InvalidOption, "values to be a mapping of column names"),
        ("done", InvalidOption, "values to be a mapping of column names"),
        ({"finished": True}, InvalidDone, "expected values to name columns of tests.Errand"),
    ],
)
def test_values_that_mark_done_cannot_write_are_refused(
    values: Any, error: Any, words: str
) -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    run = processor(done=lambda row, result: {"done": True, "result": result})
    with pytest.raises(error, match=words):
        run.mark_done(Errand.objects.all(), values=values)
    assert not the.state(doubtful)["done"]


@pytest.mark.parametrize("act", ["requeue", "mark_done"])
def test_a_copy_that_is_still_at_work_overwrites_nothing(act: str) -> None:
    """In doubt, the process need not be dead. What a person has decided stays."""
    [row] = the.errands(1)
    said: list[Any] = []

    def handle(row: Errand) -> str:
        mine = Errand.objects.using("other").filter(pk=row.pk)
        assert getattr(run, act)(mine) == 1
        said.append(Errand.objects.using("other").values().get())
        return "late"

    run = the.at_most_once(
        handle,
        done={"done": True},
        reset={"claimed": False},
    )
    report = run()
    assert_run(report, lease_lost=1)
    assert said == [Errand.objects.values().get(pk=row.pk)]


def test_a_copy_that_is_still_at_work_does_not_settle_for_the_next_one() -> None:
    """Requeued and claimed again: the marks differ by their times."""
    [row] = the.errands(1)
    states: list[Any] = []

    def first(row: Errand) -> str:
        run.requeue(Errand.objects.filter(pk=row.pk))
        the.elsewhere(second)
        return "first"

    def handle_second(row: Errand) -> None:
        raise KeyboardInterrupt

    def second() -> None:
        with pytest.raises(KeyboardInterrupt):
            the.at_most_once(handle_second)()
        states.append(the.state(row))

    run = the.at_most_once(first, reset={"claimed": False})
    assert_run(run(), lease_lost=1)
    assert states == [the.state(row)]
    assert (states[0]["claimed"], states[0]["claimed_at"], states[0]["done"]) == (True, True, False)


def test_requeue_frees_a_lease_and_its_holder_notices() -> None:
    [row] = the.errands(1)

    def handle(row: Errand) -> None:
        assert run.requeue(Errand.objects.filter(Q(pk=row.pk))) == 1

    run = the.at_least_once(handle, retry=the.retry(), reset={"done": False})
    assert_run(run(limit=1), lease_lost=1)
    assert the.untouched(row)
