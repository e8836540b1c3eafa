"""Clocks that are put forward and back, where Django keeps local time: ``USE_TZ=False``.

An hour that comes twice has two times of one name. What recognises a row as ours must tell the two
apart, or the settlement looks for a row that is an hour away.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.db import connection
from django.test import override_settings

from dcl_processor import Lease
from dcl_processor.checks import check_found
from dcl_processor.exceptions import Unsupported
from dcl_processor.registry import Found
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import until
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
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
            with (
                override_settings(USE_TZ=False, TIME_ZONE="America/New_York"),
                connected(path),
            ):
                yield instant
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP SCHEMA shifted CASCADE")

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

    def test_a_renewed_lease_is_recognised(began: datetime, beats_soon: None) -> None:
        """By both workers, in rows that are rehearsed with and in those that are not."""
        rows = the.errands(4)
        calls: list[int] = []
        seconds = 60.0

        def renewed(row: Errand) -> None:
            calls.append(row.pk)
            first = leased_until(row)
            assert first - began.timestamp() < seconds_since(began) + seconds + 0.1
            until(lambda: leased_until(row) > first)

        second = the.at_least_once(renewed, lease=Lease(seconds))

        def handle(row: Errand) -> None:
            if not calls:
                calls.append(row.pk)
                others = the.elsewhere(lambda: second(limit=2, wait_for_locked=0))
                assert_run(others, processed=2, stopped="limit")
                until(lambda: seconds_since(began) > 1.5)
            else:
                renewed(row)

        report = the.at_least_once(handle, lease=Lease(seconds))()
        assert_run(report, processed=2, stale=1)
        assert sorted(calls) == [row.pk for row in rows]
        assert Errand.objects.filter(done=True, leased_until=None).count() == 4

    def test_a_claim_is_recognised(began: datetime) -> None:
        rows = the.errands(4)
        calls: list[int] = []
        second = the.at_most_once(lambda row: calls.append(row.pk))

        def handle(row: Errand) -> None:
            if not calls:
                calls.append(row.pk)
                others = the.elsewhere(lambda: second(limit=2, wait_for_locked=0))
                assert_run(others, processed=2, stopped="limit")
                until(lambda: seconds_since(began) > 1.5)
            else:
                calls.append(row.pk)

        run = the.at_most_once(handle)
        report = run()
        assert_run(report, processed=2, stale=1)
        assert sorted(calls) == [row.pk for row in rows]
        assert Errand.objects.filter(done=True, claimed_at=None).count() == 4
        assert list(run.in_doubt(older_than=0)) == []


else:

    @pytest.fixture
    def handled() -> list[int]:
        return []

    def refused(handled: list[int]) -> str:
        the.errands(1)
        run = the.at_least_once(lambda row: handled.append(row.pk))
        with pytest.raises(Unsupported) as raised:
            run()
        # A system check says the same, and asks no database.
        found = Found(run, "tests.processors.handle")
        [message] = [each for each in check_found([found]) if each.level >= checks.ERROR]
        assert message.id == "dcl_processor.E011"
        assert message.msg in str(raised.value)
        return str(raised.value)

    @pytest.mark.parametrize("zone", ["America/New_York", "Africa/Casablanca", None])
    def test_a_lease_in_local_time_is_refused_where_clocks_change(
        handled: list[int], zone: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with override_settings(USE_TZ=False, TIME_ZONE=zone or "Europe/Berlin"):
            # Django takes the process's own zone then, which the settings have just set.
            monkeypatch.setattr(settings, "TIME_ZONE", zone)
            sentence = refused(handled)
        assert f"got local time of {zone or 'this system'}" in sentence
        assert sentence.endswith("choose another delivery than AT_LEAST_ONCE.")
        assert handled == []
        assert Errand.objects.filter(leased_until=None, done=False).count() == 1

    def test_so_it_is_where_the_columns_are_in_such_a_zone(handled: list[int]) -> None:
        with connected({}, time_zone="Europe/Berlin"):
            assert "local time of Europe/Berlin on 'default'" in refused(handled)
        assert handled == []

    @pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Phoenix"])
    def test_a_zone_whose_clocks_never_change_is_fine(zone: str) -> None:
        rows = the.errands(3)
        with override_settings(USE_TZ=False, TIME_ZONE=zone):
            assert_run(the.at_least_once(the.ignore)(), processed=len(rows))

    def test_other_deliveries_need_no_such_zone() -> None:
        the.errands(3)
        with override_settings(USE_TZ=False, TIME_ZONE="America/New_York"):
            report = the.at_most_once(the.ignore, retry=the.retry(), reset={"claimed": False})()
        assert_run(report, processed=3)
