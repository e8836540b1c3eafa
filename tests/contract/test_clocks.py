"""The database's clock, whatever its time zone and that of the process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings
from django.utils import timezone

from dcl_processor import Lease, Snooze
from dcl_processor.exceptions import Unsupported
from dcl_processor.pending.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

if connection.vendor != "postgresql":
    MAKE: dict[str, the.Make] = {
        "leased_until": the.at_least_once,
        "claimed_at": the.at_most_once,
        "next_attempt_at": partial(the.transactional, retry=the.retry()),
    }

    @pytest.mark.parametrize("column", MAKE)
    def test_times_of_the_package_in_local_time_are_refused(column: str) -> None:
        the.errands(1)
        run = MAKE[column](the.raising(AssertionError("expected no call")))
        with override_settings(USE_TZ=False), pytest.raises(Unsupported, match="expected USE_TZ=T"):
            run()
        assert Errand.objects.filter(leased_until=None, claimed_at=None, done=False).count() == 1

    def test_a_zone_of_the_alias_is_refused() -> None:
        the.errands(1)
        words = "expected TIME_ZONE=None or 'UTC' of the alias 'default' .* got 'Asia/Kolkata'"
        with connected({}, time_zone="Asia/Kolkata"), pytest.raises(Unsupported, match=words):
            the.at_least_once(the.ignore)()
        assert Errand.objects.filter(leased_until=None, done=False).count() == 1

    def test_a_processor_without_such_times_needs_no_zone() -> None:
        the.errands(3)
        with override_settings(USE_TZ=False, TIME_ZONE="America/New_York"):
            assert_run(the.transactional(the.ignore)(), processed=3)


# --- the database's clock is the one that counts, whatever its time zone and ours


#: What a server may say in its own settings. SQLite has no zone beside the process's, and
#: PostgreSQL's columns have one themselves, in any zone.
ZONES: dict[str, list[dict[str, Any]]] = {
    "postgresql": [{}, {"options": "-c timezone=Asia/Kolkata"}],
    "mysql": [
        {},
        {"init_command": "SET time_zone = '+05:30'"},
        {"init_command": "SET time_zone = '+00:00'"},
    ],
    "sqlite": [{}],
}


#: Only columns with a time zone keep the package's times without it.
USES = [True, False] if connection.features.supports_timezones else [True]


@pytest.fixture(params=USES, ids=lambda uses: "USE_TZ" if uses else "no USE_TZ")
def use_tz(request: pytest.FixtureRequest) -> Iterator[bool]:
    with override_settings(USE_TZ=request.param, TIME_ZONE="America/New_York"):
        yield request.param


@pytest.fixture(params=ZONES[connection.vendor], ids=lambda zone: str(zone or "default"))
def zone(request: pytest.FixtureRequest, use_tz: bool) -> Iterator[None]:
    with connected(request.param):
        yield


@pytest.mark.parametrize("hours", [0, -7, 7])
def test_a_lease_lasts_for_its_duration(
    zone: None, use_tz: bool, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the difference between two zones more or less, nor for an error of our clock."""
    if hours:
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
        assert timedelta(seconds=25) < left[0] - left[1] <= timedelta(seconds=30)
        Errand.objects.update(leased_until=left[1])
        counts.append(second(wait_for_locked=0).processed)

    report = the.at_least_once(handle, lease=Lease(30))()
    assert_run(report, lease_lost=1)
    assert counts == [0, 1]
    assert the.state(row)["done"]


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
        assert Errand.objects.filter(next_attempt_at=INSTANT).count() == 2
