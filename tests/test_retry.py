"""The value of ``Retry``: what it takes, and the delays that it gives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Value

from dcl_processor import Lease, Retry, batch_processor
from dcl_processor.exceptions import InvalidDone, InvalidOption
from tests.models import Errand


def seconds(retry: Retry, attempt: int) -> float:
    """Return the delay after an attempt, as it is added to the database's clock."""
    _, delay = retry.time_after(attempt).get_source_expressions()
    value: Any = delay.value if isinstance(delay, Value) else delay
    return float(value.total_seconds())


def test_each_delay_is_twice_the_one_before_up_to_the_longest() -> None:
    retry = Retry(backoff=10, max_delay=100, jitter=0)
    assert [seconds(retry, attempt) for attempt in range(1, 7)] == [10, 20, 40, 80, 100, 100]


def test_jitter_makes_a_delay_longer_or_shorter_by_its_part_and_never_longer_than_the_longest() -> (
    None
):
    retry = Retry(backoff=timedelta(seconds=10), max_delay=100, jitter=0.2)
    delays = [seconds(retry, 1) for _ in range(200)]
    assert min(delays) >= 8
    assert max(delays) <= 12
    assert max(delays) - min(delays) > 2
    longest = [seconds(retry, 9) for _ in range(200)]
    assert min(longest) >= 80
    assert max(longest) <= 100


def test_no_number_of_attempts_is_too_high_for_the_delay() -> None:
    assert seconds(Retry(max_attempts=100_000, jitter=0), 99_999) == 3600


def test_it_gives_up_at_the_last_attempt_and_at_errors_that_are_not_worth_one() -> None:
    retry = Retry(max_attempts=3, on=(OSError, ValueError), give_up_on=ConnectionError)
    assert [retry.gives_up(OSError(), attempt, 3) for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert retry.gives_up(KeyError(), 1, 3)
    assert retry.gives_up(ConnectionResetError(), 1, 3)
    assert not retry.gives_up(UnicodeError(), 1, 3)
    assert not retry.gives_up(OSError(), 99, None)


def test_the_error_is_cut_to_what_its_column_holds() -> None:
    noted = Retry(last_error="result").given_up(ValueError("é" * 500), 1, Errand)
    assert noted["result"] == "ValueError: " + "é" * 38
    assert len(Retry().given_up(ValueError("é" * 5000), 1, Errand)["last_error"]) == 2_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_attempts": 0}, "max_attempts to be a whole number of attempts from 1, got 0"),
        ({"max_attempts": True}, "max_attempts to be a whole number of attempts from 1, got True"),
        ({"backoff": -1}, "backoff to be a number of seconds from 0.* got -1"),
        ({"max_delay": float("nan")}, "max_delay .* got nan"),
        ({"jitter": 1.5}, "jitter to be a number from 0 to 1, got 1.5"),
        ({"on": "ValueError"}, "on to be an exception class or a tuple of them, got 'ValueError'"),
        ({"give_up_on": [ValueError]}, "give_up_on to be an exception class or a tuple"),
        (
            {"attempts": None},
            r"to be None, or a function of the row, with attempts=None, got 5: without a column",
        ),
        ({"attempts": None, "max_attempts": "allowed"}, "with attempts=None, got 'allowed'"),
        ({"max_attempts": "attempts"}, "a column other than attempts, next_attempt_at"),
        ({"max_attempts": ""}, "to be the name of a column"),
        ({"max_attempts": lambda: 3}, "to be a function of the row, which takes one argument"),
        ({"attempts": 3}, "attempts to be the name of a column, or None, got 3"),
        ({"last_error": b""}, "last_error to be the name of a column, or None"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Retry(**options)


@pytest.mark.parametrize(
    ("on_failure", "words"),
    [
        ("deferred", "a mapping of column names to values, .* got 'deferred'"),
        ({}, r"a mapping of column names to values, .* got \{\}"),
        ({1: 2}, "a mapping of column names"),
        ({"attempts": 3}, "columns other than attempts, next_attempt_at, last_error, got 'att"),
    ],
    ids=str,
)
def test_values_for_failures_that_cannot_work_are_refused(on_failure: Any, words: str) -> None:
    with pytest.raises(InvalidDone, match=words):
        Retry(on_failure=on_failure)


def test_a_column_that_is_left_to_the_user_may_be_written_at_failures() -> None:
    retry = Retry(
        None, attempts=None, last_error=None, on_failure={"attempts": 1, "last_error": ""}
    )
    assert retry.columns == ("next_attempt_at",)
    assert len({retry, Retry(None, attempts=None, last_error=None)}) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"retry": Retry(None, give_up_on=KeyError)},
            "expected failed=… with a Retry that gives up on some errors and has max_attempts=",
        ),
        ({"retry": Retry(None, on=OSError)}, "expected failed=…"),
        (
            {"retry": Retry(on_failure={"leased_until": None}), "delivery": "at_least_once"},
            "on_failure to name columns other than those of .* the lease, got 'leased_until'",
        ),
    ],
    ids=str,
)
def test_a_retry_that_the_other_options_contradict_is_refused(
    options: dict[str, Any], words: str
) -> None:
    asked: dict[str, Any] = {"pending": Errand.objects.filter(done=False), "done": {"done": True}}
    lease: dict[str, Any] = {"lease": Lease(30)} if "delivery" in options else {}
    with pytest.raises(ImproperlyConfigured, match=words):
        batch_processor(**asked, **lease, **options)(lambda row: None)


@pytest.mark.parametrize("failed", [{"dead": True}, lambda row, error: {"dead": True}], ids=str)
def test_without_a_limit_a_dead_letter_shows_which_rows_were_given_up(failed: Any) -> None:
    retry = Retry(None, give_up_on=KeyError)
    pending = Errand.objects.filter(done=False)
    options: dict[str, Any] = {"pending": pending, "failed": failed, "retry": retry}
    processor = batch_processor(**options, done={"done": True})(lambda row: None)
    assert processor.retry is retry
