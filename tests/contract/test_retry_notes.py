"""What is noted of an attempt, and that nothing keeps it from being noted."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from dcl_processor import Retry, batch_processor
from tests.contract.support import errands as the
from tests.contract.support.batches import statements
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import HOUR, fail, retrying
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(params=[1, 10])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_the_attempt_is_written_in_the_transaction_that_has_the_lock() -> None:
    """One commit: between the failure and its note no other session can take the row."""
    the.errands(1)
    seen: list[tuple[str, bool]] = []

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        seen.append((sql, connection.in_atomic_block))
        return execute(sql, *args)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        raise ValueError

    run = retrying(handle)
    with connection.execute_wrapper(watch):
        run()
    updates = [sql.startswith("UPDATE") and "result" in sql.split("WHERE")[0] for sql, _ in seen]
    after = [each for each in seen[updates.index(True) + 1 :] if "dcl_fence" not in each[0]]
    words = [sql.split()[0] for sql, _ in after[:5]]
    # The savepoint is that of the note.
    assert words == ["ROLLBACK", "RELEASE", "SAVEPOINT", "UPDATE", "RELEASE"]
    assert "last_error" in after[3][0]
    assert all(atomic for _, atomic in after[:5])
    noted = [sql for sql, _ in seen if "last_error" in sql and "UPDATE" in sql[:6]]
    assert len([sql for sql in noted if "done" not in sql]) == 1  # beside the flip's rehearsal


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\0b"), "ValueError: ab"),
        (ValueError("half \ud83d a pair"), "ValueError: half ? a pair"),
        (KeyError("name"), "KeyError: 'name'"),
        (ValueError(), "ValueError: ValueError()"),
    ],
    ids=["NUL", "surrogate", "quoted", "empty"],
)
def test_what_no_column_takes_is_taken_out_of_the_error(error: Exception, said: str) -> None:
    the.errands(1)

    def handle(row: Errand) -> None:
        raise error

    assert_run(retrying(handle)(), failed=1, retried=1)
    row = Errand.objects.get()
    assert (row.attempts, row.last_error) == (1, said)


def test_an_error_that_cannot_be_printed_is_counted_like_any_other() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("even that fails")

    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 0:
            raise Broken

    report = retrying(handle)()
    assert_run(report, processed=1, failed=1, retried=1)
    row = Errand.objects.get(place=0)
    assert row.attempts == 1
    assert row.last_error.startswith("Broken: ")


def test_a_long_error_is_cut_to_what_the_column_holds() -> None:
    the.errands(1)

    def handle(row: Errand) -> None:
        raise ValueError("x" * 100_000)

    assert_run(retrying(handle)(), failed=1, retried=1)
    assert len(Errand.objects.get().last_error) == 2_000
    Errand.objects.update(next_attempt_at=None)
    assert_run(retrying(handle, retry=Retry(last_error="result"))(), failed=1, retried=1)
    assert Errand.objects.get().result == "ValueError: " + "x" * 38


def test_attempts_that_the_queryset_defers_are_read_once_for_all() -> None:
    the.errands(10)
    Errand.objects.update(attempts=3)

    def handle(row: Errand) -> None:
        raise ValueError

    run = batch_processor(
        pending=Errand.objects.filter(done=False).only("place"),
        done={"done": True},
        retry=Retry(backoff=HOUR),
        batch_size=10,
    )(handle)
    with statements() as seen:
        assert_run(run(), failed=10, retried=10)
    assert len([sql for sql in seen if sql.startswith("SELECT")]) <= 5
    assert set(Errand.objects.values_list("attempts", flat=True)) == {4}


def test_a_handler_that_changes_the_instance_does_not_change_the_count() -> None:
    the.errands(1)

    def handle(row: Errand) -> None:
        row.attempts = 40
        raise ValueError

    assert_run(retrying(handle)(), failed=1, retried=1)
    assert Errand.objects.get().attempts == 1


def test_a_dead_letter_that_cannot_be_written_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture, batch_size: int
) -> None:
    the.errands(3)
    Errand.objects.create(done=True, code="taken", place=50)

    def dead(row: Errand, error: Exception) -> dict[str, Any]:
        return {"dead": True, "code": "taken"}

    run = retrying(fail, retry=Retry(max_attempts=1), failed=dead, batch_size=batch_size)
    report = run()
    assert_run(report, processed=2, failed=1)
    assert str(report.failures[0].error) == "no such place"
    row = Errand.objects.get(place=1)
    assert (row.dead, row.attempts) == (False, 1)
    assert sum("was recorded without" in record.getMessage() for record in caplog.records) == 1
