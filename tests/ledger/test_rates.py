"""``rate``, over all machines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.ledger import tokens
from dcl_processor.ledger.models import Control, ensure
from dcl_processor.ledger.tokens import Grant, Tokens
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

RATED = "shop.slow"


class Clock:
    now = 1_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Clock]]:
    """Stop the database's clock, as the tokens see it; windows end when the test says so."""
    real = tokens._read

    def read(name: str) -> Any:
        found = real(name)
        return None if found is None else (Clock.now, found[1], found[2])

    monkeypatch.setattr(tokens, "_read", read)
    before = Clock.now
    yield Clock
    Clock.now = before


def test_a_window_has_so_many_tokens_and_no_more(clock: type[Clock]) -> None:
    assert tokens.take(RATED, 10, 4).tokens == 4
    assert tokens.take(RATED, 10, 4).tokens == 4
    assert tokens.take(RATED, 10, 4).tokens == 2
    assert tokens.take(RATED, 10, 4) == Grant(0, 1.0)
    clock.now += 1
    assert tokens.take(RATED, 10, 40).tokens == 10


@pytest.mark.parametrize(("rate", "in_10_s"), [(2.5, 25), (0.5, 5), (0.3, 3), (7, 70)])
def test_over_time_the_windows_have_the_rate(clock: type[Clock], rate: float, in_10_s: int) -> None:
    clock.now = 999_000.0
    got = 0
    for _ in range(100):
        got += tokens.take(RATED, rate, 1_000).tokens
        clock.now += 0.1
    assert abs(got - in_10_s) <= 1


def test_what_was_taken_at_another_rate_is_not_paid_for_years(clock: type[Clock]) -> None:
    assert tokens.take(RATED, 30, 30).tokens == 30
    assert tokens.take(RATED, 0.1, 1).tokens == 1
    clock.now += 10
    assert tokens.take(RATED, 10, 10).tokens == 10


def test_two_machines_that_take_tokens_at_once_get_no_more_than_there_are(
    clock: type[Clock],
) -> None:
    """Forced: the second one takes all tokens after the first one has read that they are free."""
    ensure(RATED)
    others: list[int] = []

    def take_all() -> None:
        others.append(the.elsewhere(lambda: tokens.take(RATED, 10, 10).tokens))

    with before_statement(lambda sql: sql.startswith("UPDATE"), take_all):
        mine = tokens.take(RATED, 10, 10)
    assert (others, mine.tokens) == ([10], 0)


def granted(monkeypatch: pytest.MonkeyPatch, *grants: Grant) -> Tokens:
    each = iter(grants)
    monkeypatch.setattr(tokens, "take", lambda *_: next(each))
    return Tokens(RATED, 1)


def test_a_run_takes_tokens_for_a_second_at_a_time_and_not_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def grant(_: str, __: float, rows: int) -> Grant:
        asked.append(rows)
        return Grant(rows, 3600.0)

    monkeypatch.setattr(tokens, "take", grant)
    run = Tokens(RATED, 1_000)
    assert sum(run.take(1) for _ in range(1_000)) == 1_000
    assert len(asked) <= 12


def test_tokens_that_were_not_used_in_their_window_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = granted(monkeypatch, Grant(5, 0.0), Grant(1, 3600.0))
    assert (run.take(2), run.take(5)) == (2, 1)


def test_without_an_answer_no_row_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    the.errands(2)
    monkeypatch.setattr(tokens, "PATIENCE", 0.5)
    monkeypatch.setattr(Control._meta, "db_table", "no_such_table")
    report = the.transactional(the.ignore, name=RATED, rate=5)()
    assert_run(report, stopped="throttled")
    assert caplog.text.count("the ledger cannot be used") == 1


def test_no_more_rows_start_in_a_second_than_the_rate() -> None:
    the.errands(12)
    starts: list[float] = []
    report = the.transactional(lambda _: starts.append(time.time()), name=RATED, rate=5)()
    assert_run(report, processed=12)
    per_second = Counter(map(int, starts))
    assert report.duration >= 1
    # The server is this machine, and its clock the same; a row may start a moment after its token.
    assert max(per_second.values()) <= 6


def test_a_batch_is_no_larger_than_the_tokens_that_are_left() -> None:
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


def test_a_rate_below_one_ends_a_run_that_would_wait_long(clock: type[Clock]) -> None:
    the.errands(3)
    processor = the.transactional(the.ignore, name=RATED, rate=1 / 3600)
    report = processor()
    assert_run(report, processed=1, stopped="throttled")
    assert str(report).endswith("; throttled")
    assert_run(processor(), stopped="throttled")


def test_a_timeout_ends_the_wait_for_a_token() -> None:
    the.errands(3)
    report = the.transactional(the.ignore, name=RATED, rate=0.2)(timeout=0.3)
    assert report.stopped == "timeout"
    assert report.processed <= 2


def test_a_stop_ends_the_wait_for_a_token() -> None:
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
