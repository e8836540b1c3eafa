"""Pause and resume, and what runs make of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import connection
from django.test import override_settings

from dcl_processor import ledger, oversight
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.ledger import orders, tokens
from dcl_processor.ledger.desk import UnreachableError
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.models import Control, ensure
from dcl_processor.ledger.tokens import Grant, Tokens
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.overseen"


def processor(handler: Any = the.ignore, make: the.Make = the.transactional, **options: Any) -> Any:
    return make(handler, name=NAME, **options)


#: SQLite locks the whole database while a handler works in its transaction.
MAKE = the.transactional if HAS_ROW_LOCKS else the.at_least_once


def done() -> int:
    return Errand.objects.filter(done=True).count()


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
def test_a_run_of_a_paused_processor_handles_nothing_and_says_so(make: the.Make) -> None:
    the.errands(2)
    assert ledger.pause(NAME, reason="mail server down", by="anna")
    report = processor(make=make)()
    assert_run(report, stopped="paused")
    assert report.ok
    assert str(report).endswith("; paused")
    assert done() == 0
    assert ledger.resume(NAME)
    assert_run(processor(make=make)(), processed=2)


def test_a_pause_shows_who_why_and_since_when() -> None:
    ledger.pause(NAME, reason="mail\nserver", by="anna", until=3600)
    found = ledger.state(NAME)
    assert found.phase == "paused"
    assert found.pause is not None
    assert (found.pause.by, found.pause.reason) == ("anna", "mail server")
    assert found.pause.until is not None
    assert timedelta(minutes=59) < found.pause.until - found.pause.since <= timedelta(hours=1)
    assert found.sentence.startswith("paused since ")
    assert " by anna, until " in found.sentence
    assert found.sentence.endswith(": mail server")


def test_a_pause_ends_by_itself_at_its_time() -> None:
    the.errands(1)
    ledger.pause(NAME, until=3600)
    Control.objects.update(paused_until="2001-01-01T00:00:00Z")
    assert ledger.state(NAME).phase == "running"
    assert_run(processor()(), processed=1)
    assert ledger.pause(NAME), "a pause that is over can be replaced"


def test_all_processors_are_paused_by_one_order_and_one_stays_paused_by_itself() -> None:
    the.errands(1)
    ledger.pause(NAME, by="anna")
    ledger.pause(ledger.ALL, by="ben")
    assert ledger.state("shop.other").phase == "paused"
    both = ledger.state(NAME)
    assert both.pause is not None
    assert (both.pause.by, both.pause.of_all) == ("ben", True)
    ledger.resume(ledger.ALL)
    assert ledger.state("shop.other").phase == "running"
    assert_run(processor()(), stopped="paused")
    ledger.resume(NAME)
    assert_run(processor()(), processed=1)


def test_a_pause_lets_the_row_at_hand_end_and_starts_no_other(ledger: Ledger) -> None:
    import dcl_processor.ledger as api

    the.errands(3)

    def handle(row: Errand) -> None:
        the.elsewhere(lambda: api.pause(NAME))
        ledger.read([NAME])

    assert_run(processor(handle, MAKE, batch_size=3)(), processed=1, stopped="paused")
    assert done() == 1


def test_the_end_of_a_pause_wakes_the_watches(ledger: Ledger) -> None:
    import dcl_processor.ledger as api

    with oversight.command("watch", [NAME]) as record:
        assert record is not None

        def woken() -> list[str]:
            ledger.read([NAME])
            return [*record.resumed()]

        assert woken() == []
        api.pause(NAME)
        assert woken() == []
        api.resume(NAME)
        assert woken() == [NAME]
        assert woken() == []


def test_reserve_hands_out_nothing_while_it_is_paused() -> None:
    the.errands(1)
    pack = processor(make=the.at_least_once)
    ledger.pause(NAME)
    assert pack.reserve() == []
    ledger.resume(NAME)
    assert len(pack.reserve()) == 1


def test_a_reservation_leaves_nothing_behind_in_the_ledger(ledger: Ledger) -> None:
    the.errands(2)
    pack = processor(make=the.at_least_once)
    assert len(pack.reserve(1)) == len(pack.reserve(1)) == 1
    assert ledger._records == []


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_ledger_that_cannot_be_read_leaves_the_last_known_state(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, was_paused: bool, caplog: Any
) -> None:
    import dcl_processor.ledger as api

    the.errands(1)
    if was_paused:
        api.pause(NAME)
    processor()(limit=0)  # which reads the state

    def broken(do: Any, **_: Any) -> Any:
        raise UnreachableError("no ledger")

    monkeypatch.setattr(ledger.desk, "call", broken)
    # The table says the contrary, and cannot be read.
    if was_paused:
        api.resume(NAME)
        assert_run(processor()(), stopped="paused")
    else:
        api.pause(NAME)
        assert_run(processor()(), processed=1)


def test_an_order_needs_a_name_that_the_ledger_can_keep() -> None:
    with pytest.raises(InvalidOption, match="at most 255 characters"):
        ledger.pause("x" * 256)
    with pytest.raises(InvalidOption, match="expected until to be a number of seconds above 0"):
        ledger.pause(NAME, until=0)


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", [None, UTC])
def test_a_pause_until_a_time_that_is_over_is_refused(use_tz: bool, zone: Any) -> None:
    now = datetime.now(UTC).replace(tzinfo=zone)
    with override_settings(USE_TZ=use_tz):
        with pytest.raises(InvalidOption, match="expected until to be a time to come, got 20"):
            orders._end(now - timedelta(hours=26))  # over in every time zone
        assert orders._end(now + timedelta(hours=26)) is not None


# --- ``rate``, over all machines


RATED = "shop.slow"


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
    assert tokens.take(RATED, 10, 4).tokens == 4
    assert tokens.take(RATED, 10, 4).tokens == 4
    assert tokens.take(RATED, 10, 4).tokens == 2
    assert tokens.take(RATED, 10, 4) == Grant(0, 1.0)
    clock.now += 1
    assert tokens.take(RATED, 10, 40).tokens == 10


@pytest.mark.parametrize(("rate", "in_10_s"), [(2.5, 25), (0.5, 5), (0.3, 3), (7, 70)])
def test_over_time_the_windows_have_the_rate(clock: Any, rate: float, in_10_s: int) -> None:
    clock.now = 999_000.0
    got = 0
    for _ in range(100):
        got += tokens.take(RATED, rate, 1_000).tokens
        clock.now += 0.1
    assert abs(got - in_10_s) <= 1


def test_two_machines_that_take_tokens_at_once_get_no_more_than_there_are(clock: Any) -> None:
    """Forced: the second one takes all tokens after the first one has read that they are free."""
    ensure(RATED)
    others: list[int] = []

    def take_all() -> None:
        others.append(the.elsewhere(lambda: tokens.take(RATED, 10, 10).tokens))

    with before_statement(lambda sql: sql.startswith("UPDATE"), take_all):
        mine = tokens.take(RATED, 10, 10)
    assert (others, mine.tokens) == ([10], 0)


def test_a_run_takes_tokens_for_a_second_at_a_time_and_not_for_each_row() -> None:
    asked: list[int] = []

    def ask(rows: int) -> Grant:
        asked.append(rows)
        return Grant(rows, 3600.0)

    run = Tokens(ask)
    assert sum(taken(run, 1) for _ in range(1_000)) == 1_000
    assert len(asked) <= 12


def taken(run: Tokens, rows: int) -> int:
    return run.take(rows)[0]


def granted(*grants: Grant) -> Tokens:
    each = iter(grants)
    return Tokens(lambda *_: next(each))


def test_tokens_that_were_not_used_in_their_window_are_lost() -> None:
    run = granted(Grant(5, 0.0), Grant(1, 3600.0))
    assert (taken(run, 2), taken(run, 5)) == (2, 1)


def test_rows_that_were_missed_give_their_tokens_back() -> None:
    run = granted(Grant(2, 3600.0))
    rows, window = run.take(2)
    run.give_back(rows, window)
    assert (rows, taken(run, 2)) == (2, 2)


def test_tokens_of_an_earlier_window_are_not_given_back_into_a_later_one() -> None:
    """A batch that has begun in it may end in the later one."""
    run = granted(Grant(5, 0.0), Grant(5, 3600.0), Grant(0, 3600.0))
    rows, earlier = run.take(5)
    assert (rows, taken(run, 5)) == (5, 5)
    run.give_back(5, earlier)
    assert taken(run, 5) == 0


def test_what_was_taken_at_another_rate_is_not_paid_for_years(clock: Any) -> None:
    assert tokens.take(RATED, 30, 30).tokens == 30
    assert tokens.take(RATED, 0.1, 1).tokens == 1
    clock.now += 10
    assert tokens.take(RATED, 10, 10).tokens == 10


def test_without_an_answer_no_row_starts() -> None:
    def down(*_: Any) -> Grant:
        raise UnreachableError("down")

    never = Tokens(down)
    assert taken(never, 1) == 0
    hold = never.hold()
    assert hold is not None
    assert hold.wait is not None
    assert hold.wait > 10


def test_no_more_rows_start_in_a_second_than_the_rate() -> None:
    the.errands(12)
    starts: list[float] = []
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")

    def handle(row: Errand) -> None:
        starts.append(time.time())

    report = the.transactional(handle, name=RATED, rate=5)()
    assert_run(report, processed=12)
    per_second = Counter(map(int, starts))
    assert report.duration >= 1
    # The server is this machine, and its clock the same; a row may start a moment after its token.
    assert max(per_second.values()) <= 6


def test_a_rate_below_one_ends_a_run_that_would_wait_long(clock: Any) -> None:
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


def test_without_the_ledger_a_run_is_refused_with_one_sentence() -> None:
    the.errands(1)
    with (
        override_settings(DCL_PROCESSOR_LEDGER=False),
        pytest.raises(Unsupported, match=r"'dcl_processor\.ledger' in INSTALLED_APPS"),
    ):
        the.transactional(the.ignore, name=RATED, rate=5)()
    assert Errand.objects.filter(done=True).count() == 0


def test_the_check_reports_options_that_need_the_ledger() -> None:
    from dcl_processor.checks import check_ledger as check

    processor = the.transactional(the.ignore, name=RATED, rate=5)
    assert list(check(processor)) == []
    others = [config.name for config in apps.get_app_configs() if "ledger" not in config.name]
    with override_settings(INSTALLED_APPS=others):
        (error,) = check(processor)
    assert error.id == "dcl_processor.E018"
    # Every run is refused with the setting, too.
    with override_settings(DCL_PROCESSOR_LEDGER=False):
        (error,) = check(processor)
    assert (error.id, "got DCL_PROCESSOR_LEDGER=False" in error.msg) == ("dcl_processor.E018", True)


@pytest.mark.parametrize("rate", [0, -1, True, "5", float("nan"), 2_000_000])
def test_a_rate_is_a_number_of_rows(rate: Any) -> None:
    with pytest.raises(InvalidOption, match="expected rate to be a number of rows per second"):
        the.transactional(the.ignore, rate=rate)
