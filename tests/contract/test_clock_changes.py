"""Clocks that are put forward and back, where Django keeps local time: ``USE_TZ=False``.

An hour that comes twice has two times of one name. What recognises a row as ours must tell the two
apart, or the settlement looks for a row that is an hour away.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings
from django.utils import timezone

from dcl_processor import Lease, Snooze, clock
from dcl_processor.checks import check_found
from dcl_processor.exceptions import ReservationLost, Unsupported
from dcl_processor.operator.registry import Found
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import ask
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import until
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.contract.support.temporary import execute
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Local time in New York when the clocks go back, and forward: as UTC, and a second before.
FIRST, SECOND = datetime(2026, 11, 1, 5, 30, tzinfo=UTC), datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
INTO_THE_FIRST = datetime(2026, 11, 1, 4, 59, 59, tzinfo=UTC)
INTO_THE_SECOND = INTO_THE_FIRST + timedelta(hours=1)
OUT_OF_THE_SECOND = INTO_THE_FIRST + timedelta(hours=2)
OVER_THE_GAP = datetime(2026, 3, 8, 6, 59, 59, tzinfo=UTC)

if connection.vendor == "postgresql":
    # In front of the server's own function, and called by all sessions of this alias.
    SHIFTED = """
        CREATE SCHEMA shifted;
        CREATE TABLE shifted.by AS SELECT make_interval(  -- without days, which have 23 to 25 hours
            secs => %s - extract(epoch FROM pg_catalog.statement_timestamp())::float) AS shift;
        CREATE FUNCTION shifted.statement_timestamp() RETURNS timestamptz STABLE LANGUAGE sql AS
            'SELECT pg_catalog.statement_timestamp() + shift FROM shifted.by'
    """
    INSTANTS = {
        "the first of the two": FIRST,
        "the second": SECOND,
        "into the first": INTO_THE_FIRST,
        "into the second": INTO_THE_SECOND,
        "out of the second": OUT_OF_THE_SECOND,
        "over the gap": OVER_THE_GAP,
    }

    @pytest.fixture(params=INSTANTS.values(), ids=[*INSTANTS])
    def began(request: pytest.FixtureRequest) -> Iterator[datetime]:
        """Let the server's clock begin there, for a project in New York without ``USE_TZ``."""
        instant: datetime = request.param
        with connection.cursor() as cursor:
            cursor.execute(SHIFTED, [instant.timestamp()])
        path = {"options": "-c search_path=shifted,public,pg_catalog"}
        try:
            with override_settings(USE_TZ=False, TIME_ZONE="America/New_York"), connected(path):
                yield instant
        finally:
            execute("DROP SCHEMA shifted CASCADE")

    def asked(question: str) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(question)
            return cursor.fetchone()[0]

    def leased_until(row: Errand) -> float:
        return float(
            asked(f"SELECT extract(epoch FROM leased_until) FROM tests_errand WHERE id = {row.pk}")  # noqa: S608  # a number
        )

    def seconds_since(instant: datetime) -> float:
        now = asked("SELECT extract(epoch FROM statement_timestamp())")
        return float(now) - instant.timestamp()

    @the.each_delivery
    def test_a_mark_is_recognised(make: the.Make, began: datetime, beats_soon: None) -> None:
        """By both workers, in rows that are rehearsed with and in those that are not."""
        rows = the.errands(4)
        calls: list[int] = []
        seconds = 60.0

        def handle(row: Errand) -> None:
            calls.append(row.pk)
            if make is the.at_least_once:
                first = leased_until(row)
                assert first - began.timestamp() < seconds_since(began) + seconds + 0.1
                until(lambda: leased_until(row) > first)

        second = make(handle)

        def come_after_the_second(row: Errand) -> None:
            if calls:
                handle(row)
                return
            calls.append(row.pk)
            others = the.elsewhere(lambda: second(limit=2, wait_for_locked=0))
            assert_run(others, processed=2, stopped="limit")
            until(lambda: seconds_since(began) > 1.5)

        assert_run(make(come_after_the_second)(), processed=2, stale=1)
        assert sorted(calls) == [row.pk for row in rows]
        assert Errand.objects.filter(done=True, leased_until=None, claimed_at=None).count() == 4


else:
    MAKE: dict[str, the.Make] = {
        "leased_until": the.at_least_once,
        "claimed_at": the.at_most_once,
        "next_attempt_at": partial(the.transactional, retry=the.retry()),
    }

    @pytest.mark.parametrize("column", MAKE)
    @pytest.mark.parametrize(
        ("changed", "got"),
        [({"USE_TZ": False}, "USE_TZ=False"), ({"USE_TZ": False, "TIME_ZONE": "UTC"}, "USE_TZ=F")],
        ids=str,
    )
    def test_times_of_the_package_in_local_time_are_refused(
        column: str, changed: dict[str, Any], got: str
    ) -> None:
        the.errands(1)
        handled: list[int] = []
        run = MAKE[column](lambda row: handled.append(row.pk))
        with override_settings(**changed):
            with pytest.raises(Unsupported, match=rf"expected {column} to keep .* by {got}") as no:
                run()
            # A system check says the same, and asks no database.
            found = check_found([Found(run, "tests.processors.handle")])
            [message] = [each for each in found if each.is_serious()]
        assert message.id == "dcl_processor.E011"
        assert message.msg in str(no.value)
        assert handled == []
        assert Errand.objects.filter(leased_until=None, claimed_at=None, done=False).count() == 1

    def test_a_zone_of_the_alias_is_refused() -> None:
        the.errands(1)
        words = "expected leased_until to keep times in UTC, .* by TIME_ZONE='Asia/Kolkata'"
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


def read() -> Any:
    question = ask(the.PENDING, label="test")
    return clock.read(question.table, [row.pk for row in the.errands(1)])


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
