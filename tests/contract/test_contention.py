"""What a server answers to a claim when others are in the way: the row is for a later pass.

The answers are the server's own; that they come is asked for, since what brings them about differs
from one isolation level, and one version of a server, to another.
"""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, transaction

from dcl_processor import batch_processor
from dcl_processor.locking.waiting import lock_timeout
from tests.contract.support.parcels import parcels
from tests.contract.support.sessions import before_statement
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
OTHERWISE = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '57014'; END $$",
    "mysql": "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1969",
}
HAS_SERVER = connection.vendor in SAYS


def run_while_the_server_says(sql: str, at: int) -> tuple[int, int, int]:
    """Run over three rows; the claim of the row at this place is answered so."""
    parcels(3)
    calls: list[int] = []
    run = batch_processor(
        pending=Parcel.objects.filter(sent=False).order_by("priority"), done={"sent": True}
    )(lambda row: calls.append(row.priority))

    def say() -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    with before_statement(lambda asked: len(calls) == at and "SKIP LOCKED" in asked, say):
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

    def test_any_other_error_in_a_claim_ends_the_run() -> None:
        """A statement that a person, or a time-out of the server's, ended."""
        with pytest.raises(DatabaseError):
            run_while_the_server_says(OTHERWISE[connection.vendor], 1)
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
