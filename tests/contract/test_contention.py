"""What a server answers to a claim when others are in the way: the row is for a later pass.

The answers are the server's own; that they come is asked for, since what brings them about differs
from one isolation level, and one version of a server, to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from dcl_processor import batch_processor
from dcl_processor.engine import lane
from dcl_processor.locking.waiting import lock_timeout
from tests.contract.support.messages import separately
from tests.contract.support.parcels import parcels
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SAYS = {
    "postgresql": {
        code: f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"
        for code in ("40001", "40P01", "55P03")
    },
    "mysql": {
        code: f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}"
        for code in ("1213", "1205", "1020", "3572")
    },
}
#: A statement that a person, or a time-out of the server's, ended; or without memory, or a disk.
ENDED = {
    "postgresql": {
        code: f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"
        for code in ("57014", "53100", "53200")
    },
    "mysql": {
        code: f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}"
        for code in ("1969", "1317", "1021", "1038")
    },
}.get(connection.vendor, {})
#: Without a permission.
REFUSED = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '42501'; END $$",
    "mysql": "SIGNAL SQLSTATE '42000' SET MYSQL_ERRNO = 1142",
}
HAS_SERVER = connection.vendor in SAYS


def run_while_the_server_says(sql: str, at: int, rows: int = 1) -> tuple[int, int, int]:
    """Run over three rows; the claims of so many, from this place on, are answered so."""
    parcels(3)
    calls: list[int] = []
    run = batch_processor(
        pending=Parcel.objects.filter(sent=False).order_by("priority"),
        done={"sent": True},
        strict_order=True,
    )(lambda row: calls.append(row.priority))

    def answer(execute: Callable[..., Any], asked: str, *args: Any) -> Any:
        nonlocal rows
        if rows and len(calls) == at and "SKIP LOCKED" in asked:
            rows -= 1
            with connection.cursor() as cursor:
                cursor.execute(sql)
        return execute(asked, *args)

    with separately(), connection.execute_wrapper(answer):
        report = run(wait_for_locked=0)
    assert sorted(calls) == [place for place in range(3) if place != at]
    assert Parcel.objects.filter(sent=False).count() == 1
    return report.processed, report.failed, report.skipped


if HAS_SERVER:

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("code", SAYS[connection.vendor])
    def test_contention_in_a_claim_leaves_the_row_for_a_later_pass(code: str, at: int) -> None:
        said = run_while_the_server_says(SAYS[connection.vendor][code], at)
        assert said == (2, 0, 1)

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("code", ENDED)
    def test_a_claim_that_is_ended_is_the_failure_of_its_row(code: str, at: int) -> None:
        said = run_while_the_server_says(ENDED[code], at)
        assert said == (2, 1, 0)

    def test_a_server_without_time_for_any_claim_ends_the_run(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(lane, "MOST_REFUSED", 2)
        with pytest.raises(DatabaseError):
            run_while_the_server_says(next(iter(ENDED.values())), 1, rows=2)
        assert Parcel.objects.filter(sent=False).count() == 2

    def test_any_other_error_in_a_claim_ends_the_run() -> None:
        with pytest.raises(DatabaseError):
            run_while_the_server_says(REFUSED[connection.vendor], 1, rows=2)
        assert Parcel.objects.filter(sent=False).count() == 2


if connection.vendor == "mysql":

    def test_a_wait_for_a_lock_gives_the_session_its_own_limit_back() -> None:
        """Not the server's default: a limit may be set in ``init_command``."""

        def limit() -> float:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@SESSION.max_statement_time")
                return float(cursor.fetchone()[0])

        with connection.cursor() as cursor:
            cursor.execute("SET SESSION max_statement_time = 7")
        try:
            with transaction.atomic(), lock_timeout("default", 0.5):
                assert limit() == 0.5
            assert limit() == 7
        finally:
            connection.close()
