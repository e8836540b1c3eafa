"""Kinds of fault that users of other projects have reported, with an example of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.db import ProgrammingError, connection
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from dcl_processor import Retry
from dcl_processor.engine import session
from dcl_processor.exceptions import InsideTransaction, Unsupported
from tests import seams
from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

IS_POSTGRESQL = connection.vendor == "postgresql"


@contextmanager
def changed(there: str, back: str) -> Iterator[None]:
    """Change the schema for the block."""
    with connection.cursor() as cursor:
        cursor.execute(there)
        try:
            yield
        finally:
            cursor.execute(back)


if IS_POSTGRESQL:

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_a_row_that_the_claim_fails_for_ends_no_run(batch_size: int) -> None:
        rows = the.errands(5)
        trap = (
            "CREATE FUNCTION tests_trap(id bigint) RETURNS bigint LANGUAGE plpgsql AS "
            f"'BEGIN IF id = {rows[2].pk} AND pg_current_xact_id_if_assigned() IS NOT NULL THEN "
            "RAISE EXCEPTION ''trapped''; END IF; RETURN id; END'"
        )
        calls: list[int] = []
        with changed(trap, "DROP FUNCTION tests_trap"):
            report = the.transactional(
                lambda row: calls.append(row.place),
                pending=lambda: the.PENDING.extra(where=["tests_trap(id) = id"]),
                batch_size=batch_size,
            )()
        assert_run(report, processed=4, failed=1)
        assert "trapped" in str(report.failures[0].error)
        assert sorted(calls) == [0, 1, 3, 4]

    def test_a_rehearsal_that_fails_costs_no_row_an_attempt() -> None:
        """The constraint needs a value that only the handler knows."""
        the.errands(3)

        def handle(row: Errand) -> None:
            Errand.objects.filter(pk=row.pk).update(result="number")

        with changed(
            "ALTER TABLE tests_errand ADD CONSTRAINT tests_number CHECK (NOT done OR result <> '')",
            "ALTER TABLE tests_errand DROP CONSTRAINT tests_number",
        ):
            report = the.transactional(handle, retry=Retry(3))()
            assert_run(report, processed=3)
            Errand.objects.all().delete()
        assert not report.failures

    def test_a_transaction_that_the_caller_began_is_the_callers() -> None:
        the.errands(2)
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("UPDATE tests_errand SET result = 'mine'")
            with pytest.raises(InsideTransaction, match="by a BEGIN of its own"):
                the.transactional(the.ignore)()
            cursor.execute("COMMIT")
        assert set(Errand.objects.values_list("result", "done")) == {("mine", False)}

    def test_threads_that_would_see_other_rows_are_refused() -> None:
        """The schema of a tenant was chosen for the session of the caller alone."""
        the.errands(3)
        calls: list[int] = []
        with changed(
            "CREATE SCHEMA tests_tenant; CREATE TABLE tests_tenant.tests_errand (LIKE "
            "public.tests_errand INCLUDING ALL); INSERT INTO tests_tenant.tests_errand "
            "SELECT * FROM public.tests_errand; SET search_path = tests_tenant, public",
            "SET search_path = DEFAULT; DROP SCHEMA tests_tenant CASCADE",
        ):
            run = the.transactional(lambda row: calls.append(row.pk))
            with pytest.raises(Unsupported, match="connections of all threads to see"):
                run(concurrency=3)
        assert calls == []
        assert Errand.objects.filter(done=False).count() == 3

    def test_threads_have_the_callers_time_zone() -> None:
        """A day begins and ends at other times elsewhere."""
        late = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
        the.errands(3, next_attempt_at=late)
        pending = the.PENDING.filter(next_attempt_at__date=date(2026, 3, 2))
        run = the.transactional(the.ignore, pending=pending.all)
        with timezone.override("Asia/Tokyo"):
            assert_run(run(concurrency=3), processed=3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_failure_is_recorded_although_its_values_are_refused(batch_size: int) -> None:
    """The dead letter does not fit its column, and PostgreSQL ends the transaction for that."""
    the.errands(3)
    calls: list[int] = []

    def fail(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            raise ValueError("no such place")

    run = the.transactional(
        fail, retry=Retry(2, backoff=0), failed={"code": None, "dead": None}, batch_size=batch_size
    )
    assert_run(run(), processed=2, failed=1, retried=1)
    assert_run(run(), failed=1)
    assert_run(run(), failed=1)  # without a call
    assert calls.count(1) == 2
    row = Errand.objects.get(place=1)
    assert (row.attempts, row.dead) == (2, False)


def test_what_wraps_djangos_cursors_sees_each_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    the.errands(4)
    seen: list[str] = []
    execute = CursorWrapper.execute

    def look(self: Any, sql: Any, params: Any = None) -> Any:
        seen.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", look)
    assert_run(the.transactional(the.ignore)(), processed=4)
    flips = "\n".join(seen).count("UPDATE")
    assert flips >= 4 + 1  # and the rehearsal


if SENDS_SEVERAL:

    @pytest.mark.parametrize("refused_from", [0, 3])
    def test_a_pooler_that_takes_one_statement_at_a_time_costs_no_call(
        refused_from: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """From the first message on, or from a later one, which settles a row as well."""
        the.errands(6)
        calls: list[int] = []
        messages: list[int] = []

        def refuse(cursor: Any, statements: Sequence[Any]) -> Any:
            messages.append(len(statements))
            if len(messages) > refused_from:
                raise ProgrammingError("expected one statement")
            return session.in_one_message(cursor, statements)

        seams.replace(monkeypatch, seams.SEND_TOGETHER, refuse)
        assert_run(the.transactional(lambda row: calls.append(row.place))(), processed=6)
        assert calls == [0, 1, 2, 3, 4, 5]
        assert len(messages) == refused_from + 1
        said = [each for each in caplog.records if "several statements" in each.getMessage()]
        assert len(said) == 1

    def test_a_message_that_fails_costs_a_row_nothing_that_its_claim_has_missed(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Another session has row 1. The end of its empty transaction goes with the next claim."""
        rows = the.errands(4)
        failed: list[int] = []

        def fail_once(cursor: Any, statements: Sequence[Any]) -> Any:
            if len(statements) > 1 and statements[0].sql == "ROLLBACK" and not failed:
                failed.append(len(statements))
                cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")
            return session.in_one_message(cursor, statements)

        seams.replace(monkeypatch, seams.SEND_TOGETHER, fail_once)
        run = the.transactional(the.ignore, retry=the.retry(), strict_order=True)
        with part_locked(Errand, rows[1].pk):
            report = run(wait_for_locked=0)
        assert len(failed) == 1
        assert_run(report, processed=3, skipped=1)
        assert the.state(rows[1])["attempts"] == 0
