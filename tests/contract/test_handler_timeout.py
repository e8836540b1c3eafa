"""``handler_timeout``: a handler that takes too long is interrupted, and its row has failed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor import Snooze
from dcl_processor.exceptions import HandlerTimeout, Unsupported
from dcl_processor.report.errors import HandlerCancelled
from tests.contract.support import errands as the
from tests.contract.support.parcels import in_batches, note, parcels, sent, worked
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

POSTGRESQL = connection.vendor == "postgresql"

#: Seconds: a limit that is reached, and one that is not.
SOON, NEVER = 0.5, 60.0


def hang() -> None:
    """Wait in C, as a handler does whose service does not answer."""
    threading.Event().wait(the.PATIENCE)


def hang_first(row: Errand) -> None:
    if row.place == 0:
        hang()


@the.all_deliveries
def test_a_row_whose_handler_takes_too_long_fails_and_the_others_are_handled(
    make: the.Make,
) -> None:
    the.errands(3)
    report = make(hang_first, handler_timeout=SOON)()
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert isinstance(failure.error, HandlerTimeout)
    assert failure.error.seconds == SOON
    assert not issubclass(HandlerCancelled, Exception)  # which many handlers swallow
    assert "in hang" in failure.traceback  # where it was interrupted
    assert "handler_timeout=0.5 seconds" in str(failure.error)


@the.all_deliveries
def test_a_plain_handler_is_limited_in_the_main_thread_alone(make: the.Make) -> None:
    """A signal ends the wait of no other thread."""
    the.errands(4)
    called: list[int] = []
    run = make(lambda row: called.append(row.pk), handler_timeout=NEVER)
    with pytest.raises(Unsupported, match="expected a run with handler_timeout in the main thread"):
        the.elsewhere(run)
    if make is not the.transactional:
        words = "expected concurrency=1 with handler_timeout and a plain handler, .* got 2; "
        with pytest.raises(Unsupported, match=words):
            run(concurrency=2)
    assert called == []
    assert the.places(done=False, leased_until=None, claimed_at=None) == [0, 1, 2, 3]
    assert_run(run(), processed=4)


@the.each_delivery
def test_an_async_handler_is_limited_in_any_thread(make: the.Make) -> None:
    the.errands(4)

    async def handle(row: Errand) -> None:
        if row.place == 1:
            await asyncio.sleep(the.PATIENCE)

    run = make(handle, handler_timeout=SOON)
    report = the.elsewhere(lambda: run(concurrency=2))
    assert_run(report, processed=3, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)
    assert the.places(done=True) == [0, 2, 3]


THEN: dict[str, Callable[[Any], None]] = {
    "goes on": the.ignore,
    "fails": the.raising(ValueError("the service has not answered")),
    "snoozes": the.raising(Snooze(delay=60)),
    "exits": the.raising(SystemExit(1)),
    "groups": the.raising(BaseExceptionGroup("tasks", [HandlerCancelled()])),
}


@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
@the.all_deliveries
def test_whatever_a_handler_makes_of_the_interrupt_its_row_has_failed(
    make: the.Make, then: Callable[[Any], None]
) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        try:
            hang_first(row)
        except HandlerCancelled:
            then(row)

    report = make(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)


@the.all_deliveries
def test_a_person_who_interrupts_what_follows_the_interrupt_ends_the_run(make: the.Make) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        try:
            hang()
        except HandlerCancelled:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        make(handle, handler_timeout=SOON)()
    assert type(raised.value) is KeyboardInterrupt


@pytest.mark.parametrize("then", [THEN["goes on"], THEN["fails"]])
def test_whatever_an_asynchronous_handler_makes_of_it_its_row_has_failed(
    then: Callable[[Any], None],
) -> None:
    the.errands(2)

    async def handle(row: Errand) -> None:
        try:
            await asyncio.sleep(the.PATIENCE if row.place == 0 else 0)
        except asyncio.CancelledError:
            then(row)

    report = the.at_least_once(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)


def test_a_handler_that_goes_on_is_interrupted_again() -> None:
    the.errands(1)
    interrupts: list[None] = []

    def handle(row: Errand) -> None:
        while len(interrupts) < 2:
            try:
                hang()
            except HandlerCancelled:
                interrupts.append(None)

    report = the.transactional(handle, handler_timeout=SOON)()
    assert_run(report, failed=1)
    assert len(interrupts) == 2


@pytest.mark.parametrize("batch_size", [1, 3])
def test_i7_an_interrupt_rolls_its_row_back_and_leaves_no_transaction_open(batch_size: int) -> None:
    parcels(3)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        with transaction.atomic(), transaction.atomic(using="other"):
            note(row)
            if row.priority == 0:
                with transaction.atomic():
                    hang()

    report = in_batches(handle, handler_timeout=SOON, batch_size=batch_size)()
    assert_run(report, processed=2, failed=1)
    assert sent() == worked() == [1, 2]
    assert calls == [0, 1, 2]
    for alias in ("default", "other"):
        assert not connections[alias].in_atomic_block
        assert connections[alias].savepoint_ids == []
        assert not connections[alias].needs_rollback


if POSTGRESQL:

    def is_asleep(session: int) -> bool:
        """Return whether the server executes the handler's statement."""
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE pid = %s AND state = 'active' AND query LIKE '%%pg_sleep%%'",
                [session],
            )
            found: tuple[int] = cursor.fetchone()
            return found == (1,)

    @the.all_deliveries
    def test_a_statement_at_which_the_handler_was_interrupted_ends_in_the_server(
        make: the.Make,
    ) -> None:
        the.errands(2)
        sessions: list[int] = []

        def handle(row: Errand) -> None:
            if row.place == 0:
                with connections["other"].cursor() as cursor:
                    cursor.execute("SELECT pg_backend_pid()")
                    sessions.append(cursor.fetchone()[0])
                    # Longer than the wait below for its end.
                    cursor.execute(f"SELECT pg_sleep({10 * the.PATIENCE})")

        report = make(handle, handler_timeout=SOON)()
        assert_run(report, processed=1, failed=1)
        assert isinstance(report.failures[0].error, HandlerTimeout)
        until(lambda: not is_asleep(sessions[0]))


def test_each_call_of_process_batch_is_limited() -> None:
    the.errands(3)
    sizes: list[int] = []

    def handle(rows: list[Errand]) -> None:
        sizes.append(len(rows))
        if any(row.place == 1 for row in rows):
            hang()

    options = {"process_batch": handle, "batch_size": 3, "handler_timeout": SOON}
    report = the.at_least_once(the.ignore, **options)()
    assert_run(report, processed=2, failed=1)
    assert sizes == [3, 1, 1, 1]
    assert isinstance(report.failures[0].error, HandlerTimeout)


def test_a_program_keeps_its_own_handler_of_the_signal() -> None:
    the.errands(2)

    def own(*_: object) -> None:
        raise AssertionError("expected no alarm of the program")

    before = signal.signal(signal.SIGALRM, own)
    try:
        report = the.transactional(hang_first, handler_timeout=SOON)()
        assert signal.getsignal(signal.SIGALRM) is own
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_run(report, processed=1, failed=1)


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_the_session_with_the_tests_rows_is_kept() -> None:
    the.errands(2)
    report = the.transactional(hang_first, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert Errand.objects.filter(done=True).count() == 1
