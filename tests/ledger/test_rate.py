"""``rate`` over all machines, and ``throttle()``: two reasons for "not now"."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import connection
from django.test import override_settings

from dcl_processor import Breaker
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.ledger import tokens
from dcl_processor.ledger.desk import UnreachableError
from dcl_processor.ledger.tables import ensure
from dcl_processor.ledger.tokens import Grant, Share, Tokens
from dcl_processor.runner import holds
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.slow"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stop the database's clock, as the tokens see it; windows end when the test says so."""

    class Clock:
        now = 1_000_000.0

    real = tokens._read

    def read(name: str) -> Any:
        found = real(name)
        return None if found is None else (Clock.now, found[1], found[2])

    monkeypatch.setattr(tokens, "_read", read)
    return Clock


def test_a_window_has_so_many_tokens_and_no_more(clock: Any) -> None:
    assert tokens.take(NAME, 10, 4).tokens == 4
    assert tokens.take(NAME, 10, 4).tokens == 4
    assert tokens.take(NAME, 10, 4).tokens == 2
    assert tokens.take(NAME, 10, 4) == Grant(0, 1.0)
    clock.now += 1
    assert tokens.take(NAME, 10, 40).tokens == 10


@pytest.mark.parametrize(("rate", "in_10_s"), [(2.5, 25), (0.5, 5), (0.3, 3), (7, 70)])
def test_over_time_the_windows_have_the_rate(clock: Any, rate: float, in_10_s: int) -> None:
    clock.now = 999_000.0
    got = 0
    for _ in range(100):
        got += tokens.take(NAME, rate, 1_000).tokens
        clock.now += 0.1
    assert abs(got - in_10_s) <= 1


def test_two_machines_that_take_tokens_at_once_get_no_more_than_there_are(clock: Any) -> None:
    """Forced: the second one takes all tokens after the first one has read that they are free."""
    ensure(NAME)
    others: list[int] = []

    def take_all() -> None:
        others.append(the.elsewhere(lambda: tokens.take(NAME, 10, 10).tokens))

    with before_statement(lambda sql: sql.startswith("UPDATE"), take_all):
        mine = tokens.take(NAME, 10, 10)
    assert (others, mine.tokens) == ([10], 0)


def test_a_run_takes_tokens_for_a_second_at_a_time_and_not_for_each_row() -> None:
    asked: list[int] = []

    def ask(rows: int, _: bool) -> Grant:
        asked.append(rows)
        return Grant(rows, 3600.0)

    run = Tokens(1_000_000, ask, Share())
    taken = sum(run.take(1, whole=False) for _ in range(1_000))
    assert taken == 1_000
    assert len(asked) <= 12


def test_tokens_that_were_not_used_in_their_window_are_lost() -> None:
    grants = iter([Grant(5, 0.0), Grant(1, 3600.0)])
    run = Tokens(5, lambda *_: next(grants), Share())
    assert run.take(2, whole=False) == 2
    assert run.take(5, whole=False) == 1


def test_rows_that_were_missed_give_their_tokens_back() -> None:
    run = Tokens(5, lambda *_: Grant(2, 3600.0), Share())
    assert run.take(2, whole=False) == 2
    run.give_back(2, run.window)
    assert run.take(2, whole=False) == 2


def test_tokens_of_an_earlier_window_are_not_given_back_into_a_later_one() -> None:
    """A batch that has begun in it may end in the later one."""
    grants = iter([Grant(5, 0.0), Grant(5, 3600.0), Grant(0, 3600.0)])
    run = Tokens(5, lambda *_: next(grants), Share())
    assert run.take(5, whole=False) == 5
    earlier = run.window
    assert run.take(5, whole=False) == 5
    run.give_back(5, earlier)
    assert run.take(5, whole=False) == 0


def test_what_is_handled_together_may_need_more_and_the_next_windows_pay(clock: Any) -> None:
    assert tokens.take(NAME, 3, 8, whole=True) == Grant(8, 1.0)
    # 3 of the tokens are those of this window. The other 5 are missing in the next ones.
    assert tokens.take(NAME, 3, 1) == Grant(0, 2.0)
    clock.now += 1
    assert tokens.take(NAME, 3, 8, whole=True) == Grant(0, 1.0)
    clock.now += 1
    assert tokens.take(NAME, 3, 3) == Grant(1, 1.0)
    clock.now += 1
    assert tokens.take(NAME, 3, 9) == Grant(3, 1.0)


def test_a_debt_at_another_rate_is_not_paid_for_years(clock: Any) -> None:
    assert tokens.take(NAME, 10, 30, whole=True).tokens == 30
    assert tokens.take(NAME, 0.1, 1).tokens == 1
    clock.now += 10
    assert tokens.take(NAME, 10, 10).tokens == 10


def test_a_call_for_which_too_few_tokens_are_left_waits_for_the_next_window() -> None:
    grants = iter([Grant(5, 3600.0), Grant(0, 3600.0)])
    run = Tokens(5, lambda *_: next(grants), Share())
    assert run.take(5, whole=True) == 5
    run.give_back(2, run.window)
    assert run.take(5, whole=True) == 0
    assert run.hold() is not None, "it would ask again and again"


def down(*_: Any) -> Grant:
    raise UnreachableError("down")


def test_without_an_answer_the_last_rate_holds_and_without_any_the_run_ends() -> None:
    share = Share()
    run = Tokens(5, lambda *_: Grant(2, 0.0), share)
    assert run.take(2, whole=False) == 2
    # As another run of the same process, while the ledger does not answer.
    assert Tokens(5, down, share).take(5, whole=False) == 2
    never = Tokens(5, down, Share())
    assert never.take(1, whole=False) == 0
    hold = never.hold()
    assert hold is not None
    assert hold.wait is not None
    assert hold.wait > 10


@pytest.mark.parametrize(("rate", "seconds"), [(5, 1.0), (0.1, 10.0)])
def test_without_an_answer_a_share_is_for_one_window_and_for_all_runs_of_the_process(
    rate: float, seconds: float
) -> None:
    share = Share()
    share.note(Grant(2, 0.0), 0.0)
    assert Tokens(rate, down, share).take(9, whole=False) == 2
    second = Tokens(rate, down, share)
    assert second.take(1, whole=False) == 0
    hold = second.hold()
    assert hold is not None
    assert hold.wait == pytest.approx(seconds, abs=0.5)
    # What was granted in this window is not granted again.
    busy = Share()
    busy.note(Grant(2, 3600.0), time.monotonic())
    assert Tokens(rate, down, busy).take(1, whole=False) == 0


def test_no_more_rows_start_in_a_second_than_the_rate() -> None:
    the.errands(12)
    starts: list[float] = []
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")

    def handle(row: Errand) -> None:
        starts.append(time.time())

    report = the.transactional(handle, name=NAME, rate=5)()
    assert_run(report, processed=12)
    per_second = Counter(map(int, starts))
    assert report.duration >= 1
    # The server is this machine, and its clock the same; a row may start a moment after its token.
    assert max(per_second.values()) <= 6


def test_a_rate_below_one_ends_a_run_that_would_wait_long(clock: Any) -> None:
    the.errands(3)
    processor = the.transactional(the.ignore, name=NAME, rate=1 / 3600)
    report = processor()
    assert_run(report, processed=1, stopped="throttled")
    assert str(report).endswith("; throttled")
    assert_run(processor(), stopped="throttled")


def test_a_timeout_ends_the_wait_for_a_token() -> None:
    the.errands(3)
    report = the.transactional(the.ignore, name=NAME, rate=0.2)(timeout=0.3)
    assert report.stopped == "timeout"
    assert report.processed <= 2


def test_a_stop_ends_the_wait_for_a_token() -> None:
    the.errands(3)
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    report = the.transactional(the.ignore, name=NAME, rate=0.2)(stop=stop)
    timer.join()
    assert report.stopped == "signal"


@pytest.mark.parametrize("option", ["rate", "breaker"])
def test_without_the_ledger_a_run_is_refused_with_one_sentence(option: str) -> None:
    value: Any = {"rate": 5, "breaker": Breaker()}[option]
    the.errands(1)
    with (
        override_settings(DCL_PROCESSOR_LEDGER=False),
        pytest.raises(Unsupported, match=r"'dcl_processor\.ledger' in INSTALLED_APPS"),
    ):
        the.transactional(the.ignore, name=NAME, **{option: value})()
    assert Errand.objects.filter(done=True).count() == 0


def test_the_check_reports_options_that_need_the_ledger() -> None:
    from dcl_processor.checks.databases import check_ledger as check

    processor = the.transactional(the.ignore, name=NAME, rate=5)
    assert list(check(processor)) == []
    others = [config.name for config in apps.get_app_configs() if "ledger" not in config.name]
    with override_settings(INSTALLED_APPS=others):
        (error,) = check(processor)
    assert error.id == "dcl_processor.E018"
    # Every run is refused with the setting, too.
    with override_settings(DCL_PROCESSOR_LEDGER=False):
        (error,) = check(processor)
    assert (error.id, "got DCL_PROCESSOR_LEDGER = False" in error.msg) == (
        "dcl_processor.E018",
        True,
    )


@pytest.mark.parametrize("rate", [0, -1, True, "5", float("nan"), 2_000_000])
def test_a_rate_is_a_number_of_rows(rate: Any) -> None:
    with pytest.raises(InvalidOption, match="expected rate to be a number of rows per second"):
        the.transactional(the.ignore, rate=rate)


# --- the throttle


def test_a_throttle_holds_rows_and_a_run_waits_for_a_short_one() -> None:
    the.errands(2)
    answers = iter([0.3, None])
    report = the.transactional(the.ignore, throttle=lambda: next(answers, None))()
    assert_run(report, processed=2)
    assert report.duration >= 0.3


@pytest.mark.parametrize("answer", [True, 60, timedelta(minutes=1)])
def test_a_run_ends_at_a_long_one_before_it_has_looked(answer: Any) -> None:
    the.errands(2)
    report = the.transactional(the.ignore, throttle=lambda: answer)()
    assert_run(report, stopped="throttled")
    assert report.ok


def test_a_throttle_is_asked_once_a_second_and_not_for_each_row() -> None:
    the.errands(30)
    asked: list[float] = []
    report = the.transactional(the.ignore, throttle=lambda: asked.append(0.0))()
    assert_run(report, processed=30)
    assert len(asked) <= 1 + report.duration


def test_a_throttle_is_asked_outside_any_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two batches, when the COMMIT of the last one may wait for the next claim."""
    monkeypatch.setattr(holds, "ASK_EVERY", 0.0)
    the.errands(10)
    open_: list[bool] = []
    handled: list[int] = []

    def throttle() -> None:
        committed = Errand.objects.using("other").filter(done=True).count()
        open_.append(connection.in_atomic_block or committed < len(handled))

    the.transactional(lambda row: handled.append(row.pk), throttle=throttle)()
    assert len(open_) > 10
    assert not any(open_)


def test_a_throttle_that_raises_ends_the_run() -> None:
    the.errands(1)

    def throttle() -> None:
        raise LookupError("no quota")

    with pytest.raises(LookupError, match="no quota"):
        the.transactional(the.ignore, throttle=throttle)()
    assert Errand.objects.filter(done=True).count() == 0


def test_what_a_throttle_returns_is_a_time() -> None:
    the.errands(1)
    with pytest.raises(InvalidOption, match="expected throttle"):
        the.transactional(the.ignore, throttle=lambda: "soon")()
