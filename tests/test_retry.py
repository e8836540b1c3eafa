"""The value of ``Retry``: what it takes, and the delays that it gives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Value

from dcl_processor import Retry
from dcl_processor.exceptions import InvalidOption
from tests.models import Errand


def seconds(retry: Retry, attempt: int) -> float:
    """Return the delay after an attempt, as it is added to the database's clock."""
    _, delay = retry.in_(attempt).get_source_expressions()
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
    assert [retry.gives_up(OSError(), attempt) for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert retry.gives_up(KeyError(), 1)
    assert retry.gives_up(ConnectionResetError(), 1)
    assert not retry.gives_up(UnicodeError(), 1)


def test_the_error_is_cut_to_what_its_column_holds() -> None:
    noted = Retry(last_error="result").given_up(ValueError("é" * 500), 1, Errand)
    assert noted["result"] == "ValueError: " + "é" * 38
    assert len(Retry().given_up(ValueError("é" * 5000), 1, Errand)["last_error"]) == 2_000


def test_it_is_a_value() -> None:
    assert Retry(3) == Retry(3)
    assert len({Retry(3), Retry(3), Retry(4)}) == 2
    with pytest.raises(AttributeError):
        Retry().max_attempts = 7  # type: ignore[misc]  # frozen: that is what is tested


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
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Retry(**options)
