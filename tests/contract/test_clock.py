"""The database's clock is the one that counts, whatever its time zone and ours."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone

from dcl_processor import Lease, Snooze, clock
from dcl_processor.candidates.question import ask
from dcl_processor.clock import DatabaseNow
from dcl_processor.exceptions import InvalidOption, ReservationLost
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import until
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: What a server may say in its own settings, and the project of its columns. SQLite has no zone
#: beside the process's, and PostgreSQL's columns have one themselves, in any zone.
ZONES: dict[str, list[dict[str, Any]]] = {
    "postgresql": [{}, {"options": "-c timezone=Asia/Kolkata"}],
    "mysql": [
        {},
        {"init_command": "SET time_zone = '+05:30'"},
        {"init_command": "SET time_zone = '+00:00'"},
        {"TIME_ZONE": "Asia/Kolkata"},
    ],
    "sqlite": [{}, {"TIME_ZONE": "Asia/Kolkata"}],
}


@pytest.fixture(params=[True, False], ids=["USE_TZ", "no USE_TZ"])
def use_tz(request: pytest.FixtureRequest) -> Iterator[bool]:
    # A lease in local time needs clocks that never change.
    moves = request.param or connection.features.supports_timezones
    local = "America/New_York" if moves else "Asia/Tokyo"
    with override_settings(USE_TZ=request.param, TIME_ZONE=local):
        yield request.param


@pytest.fixture(params=ZONES[connection.vendor], ids=lambda zone: str(zone or "default"))
def zone(request: pytest.FixtureRequest, use_tz: bool) -> Iterator[None]:
    options = dict(request.param)
    columns = options.pop("TIME_ZONE", None)
    # Without USE_TZ Django knows one zone alone, and refuses another.
    with connected(options, time_zone=columns if use_tz else None):
        yield


def read() -> Any:
    question = ask(the.PENDING, label="test")
    return clock.read(question.table, [row.pk for row in the.errands(1)])


def test_the_clock_gives_now(zone: None, use_tz: bool) -> None:
    """As a DateTimeField would keep it: aware, or the time on the wall of ``TIME_ZONE``."""
    before = timezone.now()
    now = read()
    # An instant where the column keeps one.
    assert timezone.is_aware(now) is (use_tz or connection.features.supports_timezones)
    if timezone.is_naive(before) and timezone.is_aware(now):
        before = timezone.make_aware(before)
    assert abs(now - before) < timedelta(seconds=60)


def test_a_lease_lasts_for_its_duration(zone: None, use_tz: bool) -> None:
    """Not for the difference between two time zones more or less."""
    [row] = the.errands(1)
    second = the.at_least_once(the.ignore)
    counts: list[int] = []

    def handle(row: Errand) -> None:
        counts.append(second(wait_for_locked=0).processed)
        left = Errand.objects.annotate(now=DatabaseNow()).values_list("leased_until", "now").get()
        assert left[0] is not None
        assert timedelta(seconds=25) < left[0] - left[1] <= timedelta(seconds=30)
        Errand.objects.update(leased_until=left[1])
        counts.append(second(wait_for_locked=0).processed)

    report = the.at_least_once(handle, lease=Lease(30))()
    assert_run(report, lease_lost=1)
    assert counts == [0, 1]
    assert the.state(row)["done"]


def test_a_renewal_is_recognised(zone: None, use_tz: bool, beats_soon: None) -> None:
    [row] = the.errands(1)

    def renewed() -> Any:
        return Errand.objects.values_list("leased_until", flat=True).get(pk=row.pk)

    def handle(row: Errand) -> None:
        first = renewed()
        assert first is not None
        until(lambda: renewed() > first + timedelta(seconds=0.5))

    report = the.at_least_once(handle, lease=Lease(60))()
    assert_run(report, processed=1)


def test_backoff_and_snooze_count_from_now(zone: None, use_tz: bool) -> None:
    def handle(row: Errand) -> None:
        if row.place == 0:
            raise Snooze("closed", delay=300)
        raise ValueError

    the.errands(2)
    the.at_least_once(handle, retry=the.retry(backoff=300))()
    for at, now in Errand.objects.annotate(now=DatabaseNow()).values_list("next_attempt_at", "now"):
        assert at is not None
        assert timedelta(seconds=240) < at - now <= timedelta(seconds=300)


def test_a_row_is_snoozed_until_a_time_that_django_writes(zone: None, use_tz: bool) -> None:
    """The database's clock is on the side of Django's, wherever the server is."""
    rows = the.errands(4)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        minutes = 5 if row.place < 2 else -5
        raise Snooze(until=timezone.now() + timedelta(minutes=minutes))

    run = the.at_least_once(handle, retry=the.retry())
    assert_run(run(), snoozed=4)
    assert_run(run(), snoozed=2)
    assert sorted(calls) == [0, 1, 2, 2, 3, 3]
    Errand.objects.update(next_attempt_at=timezone.now() - timedelta(minutes=1))
    assert_run(the.at_least_once(the.ignore, retry=the.retry())(), processed=len(rows))


def test_in_doubt_counts_from_a_time_that_django_writes(zone: None, use_tz: bool) -> None:
    old, new = the.errands(2, claimed=True)
    for row, minutes in ((old, 10), (new, 1)):
        since = timezone.now() - timedelta(minutes=minutes)
        Errand.objects.filter(pk=row.pk).update(claimed_at=since)
    run = the.at_most_once(the.ignore)
    assert list(run.in_doubt(older_than=timedelta(minutes=5))) == [old]
    assert list(run.in_doubt(older_than=timedelta(minutes=20))) == []


@pytest.mark.parametrize("hours", [-7, 7])
def test_this_process_may_have_the_wrong_time(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is asked for nothing: neither for a lease nor for a delay."""
    wrong = datetime.now(UTC) + timedelta(hours=hours)
    monkeypatch.setattr(timezone, "now", lambda: wrong)
    monkeypatch.setattr("time.time", wrong.timestamp)
    [row] = the.errands(1)
    second = the.at_least_once(the.ignore)
    counts: list[int] = []

    def handle(row: Errand) -> None:
        counts.append(second(wait_for_locked=0).processed)
        left = Errand.objects.annotate(now=DatabaseNow()).values_list("leased_until", "now").get()
        assert left[0] is not None
        assert timedelta(0) < left[0] - left[1] <= timedelta(seconds=30)

    assert_run(the.at_least_once(handle, lease=Lease(30))(), processed=1)
    assert counts == [0]
    assert the.state(row)["done"]


def test_the_clock_moves_within_a_transaction() -> None:
    with transaction.atomic():
        first = read()
        until(lambda: read() > first)


def test_the_clock_says_nothing_of_rows_that_are_gone() -> None:
    question = ask(the.PENDING, label="test")
    assert clock.read(question.table, [0]) is None


if connection.vendor == "mysql":

    @pytest.fixture
    def whole_seconds() -> Iterator[None]:
        """Make the columns as Django made them before it knew fractions, and others still do."""
        columns = ("leased_until", "claimed_at")
        with connection.cursor() as cursor:
            for name in columns:
                cursor.execute(f"ALTER TABLE tests_errand MODIFY {name} DATETIME NULL")
            yield
            for name in columns:
                cursor.execute(f"ALTER TABLE tests_errand MODIFY {name} DATETIME(6) NULL")

    @the.each_delivery
    def test_a_column_without_microseconds_is_refused(whole_seconds: None, make: Any) -> None:
        [row] = the.errands(1)
        handled: list[Any] = []
        with pytest.raises(InvalidOption, match="microseconds"):
            make(lambda row: handled.append(row.pk))()
        assert handled == []
        assert the.untouched(row)


if connection.vendor == "sqlite":
    INSTANT = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)

    @pytest.fixture
    def whole_second() -> Iterator[None]:
        """Let SQLite's clock stand still at a whole second, which comes once in a thousand."""

        def strftime(form: str, _: str) -> str:
            return INSTANT.strftime(form.replace("%f", "%S.000"))

        connection.ensure_connection()
        connection.connection.create_function("strftime", 2, strftime)
        yield
        connection.close()  # which has the function

    @the.each_delivery
    def test_a_whole_second_is_written_as_django_writes_it(whole_second: None, make: Any) -> None:
        """Otherwise what the claim wrote would not be found again, and the row be lost."""
        rows = the.errands(2)
        report = make(the.ignore)()
        assert_run(report, processed=2)
        assert all(the.state(row)["done"] for row in rows)
        Errand.objects.update(next_attempt_at=DatabaseNow())
        assert read() == INSTANT
        assert Errand.objects.filter(next_attempt_at=INSTANT).count() == 2


def test_a_lease_that_was_taken_away_is_known_in_every_zone(zone: None, use_tz: bool) -> None:
    """A worker may not renew it, and does not take it for that of another worker."""
    [row] = the.errands(1)
    run = the.at_least_once(the.ignore)
    [handed] = run.reserve()
    Errand.objects.update(leased_until=Lease(60).taken_away)
    table = Errand.objects.filter(pk=row.pk)
    assert not table.filter(Lease(60).in_flight()).exists()
    assert table.filter(Lease(60).free()).exists()
    with pytest.raises(ReservationLost) as error:
        handed.settle()
    assert error.value.reason == "lapsed"
