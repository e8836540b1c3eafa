"""What users may write for durations, numbers and the values of columns."""

from __future__ import annotations

import json
import math
import uuid
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db.models import F, Value
from django.db.models.functions import Now

from dcl_processor import Report
from dcl_processor.engine import limits
from dcl_processor.exceptions import InvalidOption, RowsFailed
from dcl_processor.report import values
from dcl_processor.report.report import Failure


@pytest.mark.parametrize(("written", "meant"), [(3, 3.0), (0.5, 0.5), (timedelta(minutes=1), 60.0)])
def test_a_duration_is_a_number_of_seconds_or_a_timedelta(
    written: float | timedelta, meant: float
) -> None:
    assert values.expect_seconds("expected timeout", written) == meant
    assert values.seconds(written) == meant
    assert values.as_timedelta(written) == timedelta(seconds=meant)


@pytest.mark.parametrize(
    ("bounds", "wrong", "words"),
    [
        ({}, -1, "from 0, or a timedelta, got -1."),
        ({}, timedelta(-1), "from 0, or a timedelta, got datetime.timedelta(days=-1)."),
        ({}, float("nan"), "from 0, or a timedelta, got nan."),
        ({}, True, "from 0, or a timedelta, got True."),
        ({}, None, "from 0, or a timedelta, got None."),
        ({}, "3", "from 0, or a timedelta, got '3'."),
        ({"above_zero": True}, 0, "above 0, or a timedelta, got 0."),
        ({"above_zero": True}, timedelta(0), "above 0, or a timedelta, got datetime.timedelta(0)."),
        ({"most": values.DAY}, 86_401, "from 0 to a day, or a timedelta, got 86401."),
        ({"most": values.TEN_YEARS}, float("inf"), "from 0 to ten years, or a timedelta, got inf."),
        ({"least": 0.5, "most": 90}, 0.4, "from 0.5 to 90, or a timedelta, got 0.4."),
        ({"fix": "; wait"}, -1, "from 0, or a timedelta, got -1; wait."),
    ],
)
def test_what_is_no_duration_is_refused_with_its_bounds(
    bounds: dict[str, Any], wrong: Any, words: str
) -> None:
    with pytest.raises(InvalidOption) as refused:
        values.expect_seconds("expected timeout", wrong, **bounds)
    assert str(refused.value) == f"expected timeout to be a number of seconds {words}"


@pytest.mark.parametrize("wrong", [0, 4, 1.5, 2.0, True, None, "2", timedelta(2)], ids=repr)
def test_what_is_no_whole_number_is_refused_with_its_bounds(wrong: Any) -> None:
    with pytest.raises(InvalidOption) as refused:
        values.expect_whole_number("expected x", wrong, of="rows", least=1, most=3)
    assert (
        str(refused.value) == f"expected x to be a whole number of rows from 1 to 3, got {wrong!r}."
    )


def test_constants_are_what_is_written_as_it_is() -> None:
    written = {"a": 1, "b": None, "c": F("a"), "d": Now(), "e": Value(1), "f": lambda: 1, "g": int}
    assert values.constants_of(written) == {"a": 1, "b": None}


def test_callables_are_called_when_the_values_are_written() -> None:
    name = F("name")
    resolved = values.resolve({"a": 1, "b": lambda: 2, "c": name})
    assert resolved == {"a": 1, "b": 2, "c": name}
    assert resolved["c"] is name


# --- how long a run waits for rows that others have locked, and in which steps


TIMEOUT, LONGER = 20.0, 40.0


class Frozen(Event):
    """A clock that stands still, and a stop whose waiting alone puts it forward."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def monotonic(self) -> float:
        return math.fsum(self.waited)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Frozen:
    clock = Frozen()
    monkeypatch.setattr(limits, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("timeout", "wait_for_locked"), [(None, TIMEOUT), (TIMEOUT, LONGER), (LONGER, TIMEOUT)]
)
def test_waits_grow_and_end_with_the_shorter_of_the_two_times(
    clock: Frozen, timeout: float | None, wait_for_locked: float
) -> None:
    plan = limits.Limits(limit=None, timeout=timeout, wait_for_locked=wait_for_locked, stop=clock)
    assert all(plan.waits())
    *waited, last = clock.waited
    assert clock.monotonic() == pytest.approx(TIMEOUT)
    longest = [min(limits.FIRST_WAIT * 2**n, limits.LONGEST_WAIT) for n in range(len(waited))]
    assert all(most / 2 <= each <= most for each, most in zip(waited, longest, strict=True))
    assert last <= limits.LONGEST_WAIT
    # Copies that met once must not meet again.
    assert len(set(waited[-10:])) == 10


def test_a_run_that_may_not_wait_does_not(clock: Frozen) -> None:
    plan = limits.Limits(limit=None, timeout=None, wait_for_locked=0, stop=clock)
    assert list(plan.waits()) == clock.waited == []


# --- the report as a value


FAILURE = Failure(uuid.UUID(int=7), ValueError("no address"), "Traceback …")


def test_it_is_ok_unless_rows_failed_or_failures_ended_the_run() -> None:
    assert Report(name="shop.send", processed=3, skipped=1).ok
    assert not Report(name="shop.send", failed=1).ok
    assert not Report(name="shop.send", stopped="failures").ok


def test_raise_for_failures_raises_from_the_first_error() -> None:
    report = Report(name="shop.send", failed=2, failures=(FAILURE,))
    with pytest.raises(RowsFailed, match=r"shop.send: 2 failed in 0.00 s") as raised:
        report.raise_for_failures()
    assert raised.value.__cause__ is FAILURE.error
    assert raised.value.report is report


def test_one_line_leaves_out_what_is_nothing() -> None:
    report = Report(name="shop.send", processed=3, skipped=1, duration=1.25, stopped="limit")
    assert str(report) == "shop.send: 3 processed, 1 skipped in 1.25 s; stopped by limit"
    assert str(Report(name="shop.send")) == "shop.send: nothing pending in 0.00 s"


def test_a_run_that_was_stopped_does_not_claim_that_nothing_was_pending() -> None:
    report = Report(name="shop.send", stopped="failures")
    assert str(report) == "shop.send: no row tried in 0.00 s; stopped by failures"


def test_it_goes_through_json() -> None:
    report = Report(name="shop.send", processed=1, failed=1, failures=(FAILURE,), duration=0.5)
    assert json.loads(json.dumps(report.as_dict())) == {
        "name": "shop.send",
        "processed": 1,
        "failed": 1,
        "discarded": 0,
        "snoozed": 0,
        "skipped": 0,
        "stale": 0,
        "lease_lost": 0,
        "held": 0,
        "to_retry": 0,
        "redone": 0,
        "passes": 0,
        "duration": 0.5,
        "stopped": "drained",
        "ok": False,
        "error": None,
        "failures": [
            {
                "pk": "00000000-0000-0000-0000-000000000007",
                "error": "ValueError('no address')",
                "traceback": "Traceback …",
                "attempt": None,
                "max_attempts": None,
                "again_in": None,
            }
        ],
    }
    assert report.__json__() == report.as_dict()


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"processed": 3, "stale": 11_230}, "p: 3 processed in 0.00 s"),
        ({"stale": 2}, "p: all rows done by other workers in 0.00 s"),
        ({}, "p: nothing pending in 0.00 s"),
    ],
)
def test_rows_that_others_have_done_do_not_look_like_damage(counts: Any, shown: str) -> None:
    assert str(Report(name="p", **counts)) == shown
