"""``rate``, over all machines."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.ledger import control, run
from dcl_processor.ledger.models import Control
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import uncommitted
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

RATED = "shop.slow"


def take(wanted: int, rate: float = 10) -> int:
    Control.objects.get_or_create(processor=RATED)
    return control.take(RATED, rate, wanted)


def test_at_most_the_rows_of_a_second_start_and_no_more_until_they_are_due() -> None:
    assert take(25) == 10
    assert take(1) == 0
    Control.objects.update(free_at=timezone.now() + timedelta(seconds=0.1))
    assert take(1) == 1, "a run asks again in 0.1 seconds"


def test_rows_that_did_not_start_give_no_credit() -> None:
    take(1)
    Control.objects.update(free_at=timezone.now() - timedelta(days=1))
    assert (take(10), take(1)) == (10, 0)


def test_a_rate_below_one_lets_a_row_start_now_and_then() -> None:
    assert (take(5, 0.1), take(5, 0.1)) == (1, 0)
    free_at = Control.objects.get().free_at
    assert free_at is not None
    assert timedelta(seconds=8) < free_at - timezone.now() <= timedelta(seconds=10)


if HAS_ROW_LOCKS:

    def test_two_machines_that_take_rows_at_once_get_no_more_than_the_rate() -> None:
        """Forced: the second statement waits for the lock of the first one's row."""
        Control.objects.create(processor=RATED)
        mine: list[int] = []
        with (
            uncommitted(lambda: mine.append(take(10))) as commit,
            the.meanwhile(lambda: take(10)) as others,
        ):
            wait_until_a_session_waits()
            commit()
        assert (mine, others) == ([10], [0])


def test_without_an_answer_no_row_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    the.errands(2)
    monkeypatch.setattr(run, "PATIENCE", 0.5)
    monkeypatch.setattr(Control._meta, "db_table", "no_such_table")
    report = the.transactional(the.ignore, name=RATED, rate=5)()
    assert_run(report, stopped="throttled")
    assert caplog.text.count("the ledger cannot be used") == 1


def test_a_batch_is_no_larger_than_the_rows_of_a_second() -> None:
    the.errands(7)
    report = the.transactional(the.ignore, name=RATED, rate=3, batch_size=10)()
    assert_run(report, processed=7)
    assert report.duration >= 1


def test_rows_start_at_the_rate_while_handlers_take_longer() -> None:
    """Free places wait for a token, and not for the end of a handler."""
    the.errands(4)
    all_began = threading.Barrier(4)

    def handle(_: Errand) -> None:
        all_began.wait(the.PATIENCE)

    processor = the.at_least_once(handle, name=RATED, rate=2, concurrency=4)
    assert_run(processor(), processed=4)


def test_a_run_that_would_wait_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PATIENCE", 0.5)
    the.errands(3)
    processor = the.transactional(the.ignore, name=RATED, rate=1 / 3600)
    report = processor()
    assert_run(report, processed=1, stopped="throttled")
    assert str(report).endswith("; throttled")
    assert_run(processor(), stopped="throttled")


def test_a_timeout_ends_the_wait() -> None:
    the.errands(3)
    report = the.transactional(the.ignore, name=RATED, rate=0.2)(timeout=0.3)
    assert report.stopped == "timeout"
    assert report.processed <= 2


def test_a_stop_ends_the_wait() -> None:
    the.errands(3)
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    report = the.transactional(the.ignore, name=RATED, rate=0.2)(stop=stop)
    timer.join()
    assert report.stopped == "signal"
    assert report.processed <= 2


def test_without_the_ledger_a_run_is_refused_with_one_sentence() -> None:
    the.errands(1)
    with (
        override_settings(DCL_PROCESSOR_LEDGER=False),
        pytest.raises(Unsupported, match=r"'dcl_processor\.ledger' in INSTALLED_APPS"),
    ):
        the.transactional(the.ignore, name=RATED, rate=5)()
    assert Errand.objects.filter(done=True).count() == 0


@pytest.mark.parametrize("rate", [0, -1, True, "5", float("nan"), 2_000_000])
def test_a_rate_is_a_number_of_rows(rate: Any) -> None:
    with pytest.raises(InvalidOption, match="expected rate to be a number of rows per second"):
        the.transactional(the.ignore, rate=rate)
