"""What a handler may do to its row, its transaction and its run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from dcl_processor import batch_processor
from dcl_processor.exceptions import StillPending, Unsupported
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.models import Depot, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def sent() -> list[int]:
    """Places of the parcels that were flipped."""
    return list(Parcel.objects.filter(sent=True).order_by("pk").values_list("priority", flat=True))


def test_a_handler_that_raises_costs_no_other_row_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="worked")
        if row.priority == 1:
            raise ValueError("no such address")

    with caplog.at_level(logging.INFO, logger="dcl_processor"):
        report = processor(handle)()

    assert_run(report, processed=2, failed=1)
    assert not report.ok
    assert sent() == [0, 2]
    assert list(Parcel.objects.order_by("pk").values_list("note", flat=True)) == [
        "worked",
        "",
        "worked",
    ]
    [failure] = report.failures
    assert failure.pk == Parcel.objects.get(priority=1).pk
    assert repr(failure.error) == "ValueError('no such address')"
    assert "in handle" in failure.traceback
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage() == f"tests.handle: row {failure.pk} failed: no such address"
    assert error.exc_info is not None
    assert [r.levelname for r in caplog.records] == ["ERROR", "INFO"]


def test_a_failed_row_is_not_tried_again_in_its_run_and_is_in_the_next() -> None:
    parcels(2)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if row.priority == 0 and len(calls) < 3:
            raise ValueError

    run = processor(handle)
    assert_run(run(), processed=1, failed=1)
    assert calls == [0, 1]
    assert_run(run(), processed=1)
    assert calls == [0, 1, 0]


def test_a_database_error_that_gets_out_of_the_handler_fails_the_row_alone() -> None:
    parcels(3)
    Parcel.objects.create(sent=True, code="taken")

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            Parcel.objects.filter(pk=row.pk).update(code="taken")

    report = processor(handle)()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, IntegrityError)
    assert Parcel.objects.get(priority=1).sent is False


def test_a_database_error_that_the_handler_swallowed_never_flips_without_its_work() -> None:
    """PostgreSQL has broken off the transaction; elsewhere it goes on, and so does the row."""
    parcels(3)
    Parcel.objects.create(sent=True, code="taken")

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="worked")
        if row.priority == 1:
            try:
                with connection.cursor() as cursor:
                    cursor.execute("UPDATE tests_parcel SET code = 'taken' WHERE id = %s", [row.pk])
            except DatabaseError:
                pass

    report = processor(handle)()
    failed = 1 if connection.vendor == "postgresql" else 0
    assert_run(report, processed=3 - failed, failed=failed)
    flipped = set(Parcel.objects.filter(sent=True, code=None).values_list("pk", flat=True))
    assert flipped == set(Parcel.objects.filter(note="worked").values_list("pk", flat=True))


def test_an_error_swallowed_around_a_savepoint_costs_nothing() -> None:
    parcels(1)
    Parcel.objects.create(sent=True, code="taken")

    def handle(row: Parcel) -> None:
        try:
            with transaction.atomic():
                Parcel.objects.filter(pk=row.pk).update(code="taken")
        except IntegrityError:
            Parcel.objects.filter(pk=row.pk).update(note="used another")

    assert_run(processor(handle)(), processed=1)
    assert Parcel.objects.filter(sent=True, note="used another").count() == 1


def test_a_handler_may_roll_its_own_work_back_without_raising() -> None:
    parcels(1)

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="half done")
        transaction.set_rollback(True)

    report = processor(handle)()
    assert_run(report, failed=1)
    assert Parcel.objects.get().note == ""


def test_a_handler_that_deletes_its_row_has_processed_it() -> None:
    parcels(2)

    def handle(row: Parcel) -> None:
        row.delete()

    report = processor(handle)()
    assert_run(report, processed=2)
    assert not Parcel.objects.exists()


def test_a_handler_that_copies_its_row_does_not_move_the_flip_to_the_copy() -> None:
    parcels(1)
    original = Parcel.objects.get()

    def handle(row: Parcel) -> None:
        row.pk = None
        row.note = "copy"
        row.sent = True
        row._state.adding = True
        row.save()

    assert_run(processor(handle)(), processed=1)
    original.refresh_from_db()
    assert original.sent is True
    assert original.note == ""


def test_a_handler_may_flip_the_flag_itself() -> None:
    parcels(2)

    def handle(row: Parcel) -> None:
        row.sent = True
        row.save()

    assert_run(processor(handle)(), processed=2)
    Parcel.objects.update(sent=False)
    assert_run(processor(handle, done=None)(), processed=2)
    assert sent() == [0, 1]


def test_a_handler_that_leaves_its_row_pending_is_found_out_at_the_second_row() -> None:
    parcels(5)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)

    report = processor(handle, done=None)()
    assert_run(report, failed=2, stopped="failures")
    assert len(calls) == 2
    assert {type(failure.error) for failure in report.failures} == {StillPending}
    assert not report.ok


def test_one_row_that_the_handler_leaves_pending_does_not_stop_the_others() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        if row.priority:
            Parcel.objects.filter(pk=row.pk).update(sent=True)

    report = processor(handle, done=None)()
    assert_run(report, processed=2, failed=1)


def test_columns_that_the_handler_changes_are_kept_and_no_others_are_written() -> None:
    parcels(1)

    def handle(row: Parcel) -> None:
        row.note = "set on the instance, not saved"
        Parcel.objects.filter(pk=row.pk).update(weight=7)

    assert_run(processor(handle)(), processed=1)
    row = Parcel.objects.get()
    assert (row.weight, row.note, row.sent) == (7, "", True)


def test_i11_an_edit_that_came_between_read_and_lock_is_not_overwritten() -> None:
    """The flip is not a save(): it knows nothing of the columns it does not name."""
    parcels(2)
    seen: list[str] = []

    def handle(row: Parcel) -> None:
        if row.priority == 0:
            later = Parcel.objects.using("default").filter(priority=1)
            later.update(note="edited meanwhile")
        seen.append(row.note)

    assert_run(processor(handle)(), processed=2)
    assert seen == ["", "edited meanwhile"]
    assert Parcel.objects.get(priority=1).note == "edited meanwhile"


def test_a_result_reaches_the_flip_in_the_same_write() -> None:
    parcels(2)

    def handle(row: Parcel) -> int:
        return row.priority + 10

    def done(row: Parcel, result: int) -> dict[str, Any]:
        return {"sent": True, "weight": result, "note": f"was {row.priority}"}

    assert_run(processor(handle, done=done)(), processed=2)
    assert list(Parcel.objects.order_by("pk").values_list("weight", "note")) == [
        (10, "was 0"),
        (11, "was 1"),
    ]


def test_a_get_done_that_raises_is_its_rows_failure() -> None:
    parcels(2)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "note": {1: "only the second"}[row.priority]}

    report = processor(lambda row: None, done=done)()
    assert_run(report, processed=1, failed=1)
    assert sent() == [1]


def test_a_nested_atomic_and_its_on_commit_run_after_the_rows_commit() -> None:
    parcels(1)
    seen: list[tuple[bool, str]] = []

    def look() -> None:
        row = Parcel.objects.using("other").get()
        seen.append((row.sent, row.note))

    def handle(row: Parcel) -> None:
        with transaction.atomic():
            Parcel.objects.filter(pk=row.pk).update(note="nested")
            transaction.on_commit(look)
        assert seen == []

    assert_run(processor(handle)(), processed=1)
    assert seen == [(True, "nested")]


def test_a_failed_rows_on_commit_callbacks_do_not_run() -> None:
    parcels(2)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        transaction.on_commit(lambda: ran.append(row.priority))
        if row.priority == 0:
            raise ValueError

    processor(handle)()
    assert ran == [1]


def test_a_callback_that_raises_is_logged_and_drops_neither_the_row_nor_the_callbacks_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parcels(2)
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("the callback's own")

    def handle(row: Parcel) -> None:
        transaction.on_commit(broken)
        transaction.on_commit(lambda: ran.append(f"after {row.priority}"))

    report = processor(handle)()
    assert_run(report, processed=2)
    assert ran == ["after 0", "after 1"]
    assert sum("the callback's own" in record.getMessage() for record in caplog.records) == 2


def test_i7_a_deferred_foreign_key_that_breaks_at_commit_fails_its_row_alone() -> None:
    """MariaDB has no deferred constraints: there the insert itself fails, to the same end."""
    parcels(3)

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="worked")
        if row.priority == 1:
            Scan.objects.create(parcel_id=10**9)

    report = processor(handle)()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, IntegrityError)
    assert sent() == [0, 2]
    assert Parcel.objects.get(priority=1).note == ""
    assert not Scan.objects.exists()


def test_a_handler_that_calls_its_own_processor_is_refused_and_fails() -> None:
    parcels(1)
    runs: list[Any] = []

    def handle(row: Parcel) -> None:
        runs.append(row.pk)
        again()

    again = processor(handle)
    report = again()
    assert_run(report, failed=1)
    assert len(runs) == 1
    assert isinstance(report.failures[0].error, Unsupported)
    assert sent() == []


def test_a_keyboard_interrupt_rolls_the_row_back_and_ends_the_run() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="half done")
        if row.priority == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor(handle)()
    assert sent() == [0]
    assert Parcel.objects.get(priority=1).note == ""
    assert not connection.in_atomic_block
    assert_run(processor(lambda row: None)(), processed=2)


def test_a_handler_that_returns_a_coroutine_has_not_worked() -> None:
    parcels(1)

    async def later(row: Parcel) -> None: ...

    report = processor(lambda row: later(row))()  # noqa: PLW0108  # a coroutine function would be refused
    assert_run(report, failed=1)
    assert "coroutine" in str(report.failures[0].error)


def test_a_handler_that_closes_the_connection_settles_nothing_and_the_run_goes_on() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            connection.close()

    report = processor(handle)()
    assert_run(report, processed=2, failed=1)
    assert sent() == [0, 2]


def test_a_row_that_cannot_be_loaded_is_its_own_failure() -> None:
    """An instance may refuse to be made, say in from_db(); the other rows are not to blame."""
    parcels(3)
    calls: list[int] = []

    class Fragile(Parcel):
        class Meta:
            proxy = True
            app_label = "tests"

        @classmethod
        def from_db(cls, *args: Any, **kwargs: Any) -> Any:
            row = super().from_db(*args, **kwargs)
            if row.priority == 1:
                raise ValueError("corrupt")
            return row

    pending = Fragile.objects.filter(sent=False)
    run = batch_processor(pending=pending, done={"sent": True})(lambda row: calls.append(row.pk))
    report = run()
    assert_run(report, processed=2, failed=1)
    assert len(calls) == 2
    assert str(report.failures[0].error) == "corrupt"


def test_the_tables_beside_are_free_for_the_handler() -> None:
    depot = Depot.objects.create(name="north")
    Parcel.objects.create(depot=depot)

    def handle(row: Parcel) -> None:
        assert row.depot is not None
        row.depot.name = "south"
        row.depot.save()
        Scan.objects.create(parcel=row)

    assert_run(processor(handle)(), processed=1)
    assert Depot.objects.get().name == "south"
    assert Scan.objects.count() == 1
