"""Which options go with which delivery, and what ``Retry``, ``Lease`` and ``Snooze`` take."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Value
from django.db.models.functions import Now

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, Snooze, batch_processor
from dcl_processor.exceptions import InvalidOption
from tests.models import Errand

MOST, LEAST = Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE
CLAIM, DONE = {"claimed": True}, {"done": True}
RESET = {"claimed": False, "done": False}
LEASE = Lease(30)


def define(handler: Any = None, **options: Any) -> BatchProcessor[Errand]:
    options = {"pending": Errand.objects.filter(done=False), "done": DONE, **options}
    return batch_processor(**options)(handler or run_errand)


def run_errand(row: Errand) -> None: ...


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lease": LEASE}, r"expected no lease with TRANSACTIONAL, got lease="),
    ({"claim": CLAIM}, r"expected no claim with TRANSACTIONAL"),
    ({"claimed_at": "claimed_at"}, r"expected no claimed_at with TRANSACTIONAL"),
    ({"delivery": MOST, "lease": LEASE}, r"expected no lease with AT_MOST_ONCE"),
    ({"delivery": LEAST}, r"expected lease=Lease\(…\) with AT_LEAST_ONCE, got None"),
    (
        {"delivery": LEAST, "lease": LEASE, "claim": CLAIM},
        r"expected reset=… together with claim and a lease, got no reset",
    ),
    (
        {"delivery": LEAST, "lease": LEASE, "claimed_at": "claimed_at"},
        r"expected claimed_at together with claim=…, got AT_LEAST_ONCE without claim",
    ),
    (
        {"delivery": LEAST, "lease": LEASE, "claim": DONE, "reset": RESET},
        r"expected claim to differ from done",
    ),
    (
        {"delivery": MOST, "claim": DONE},
        r"expected claim to differ from done, .* got {'done': True} for both",
    ),
    (
        {"delivery": MOST, "done": lambda row, result: DONE},
        r"expected done=… to be a mapping with AT_MOST_ONCE .* add claim=…",
    ),
    ({"delivery": MOST, "retry": Retry()}, r"expected retry together with claim=…"),
    ({"delivery": MOST, "claimed_at": "claimed_at"}, r"expected claimed_at together with claim=…"),
    (
        {"delivery": MOST, "claim": CLAIM, "retry": Retry()},
        r"expected reset=… together with claim and retry, got no reset",
    ),
    (
        {"delivery": MOST, "claim": {"claimed_at": Now()}},
        r"expected claim to have at least one constant, .* got {'claimed_at': .*}; .* claimed_at=…",
    ),
    ({"delivery": MOST, "claim": {}}, r"expected claim to name at least one column"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"^run_errand: {words}") as refused:
        define(**options)
    assert "\n" not in str(refused.value)


def test_a_get_done_of_the_class_is_a_flip_that_depends_on_the_handler() -> None:
    class Errands(BatchProcessor[Errand]):
        delivery = MOST
        done = DONE
        pending = Errand.objects.filter(done=False).all

        def process(self, row: Errand, /) -> None: ...

        def get_done(self, row: Errand, result: Any, /) -> dict[str, Any]:
            return {"done": True, "result": result}

    with pytest.raises(
        InvalidOption, match=r"^Errands: expected done=… to be a mapping with AT_MOST_ONCE"
    ):
        Errands()
    assert Errands(claim=CLAIM).claim == CLAIM


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_attempts": 0}, r"max_attempts to be a whole number of attempts from 1, got 0"),
        ({"backoff": -1}, r"backoff to be a number of seconds from 0 .* got -1"),
        ({"max_delay": 1e300}, r"max_delay to be a number of seconds from 0 to ten years, or a"),
        ({"jitter": -0.1}, r"jitter to be a number from 0 to 1, got -0.1"),
        ({"jitter": 2}, r"jitter to be a number from 0 to 1, got 2"),
        ({"jitter": True}, r"jitter to be a number from 0 to 1, got True"),
        ({"on": "ValueError"}, r"on to be an exception class or a tuple of them, got 'ValueErr"),
        ({"on": [ValueError]}, r"on to be an exception class or a tuple of them, got \[<class"),
        ({"give_up_on": (ValueError, 3)}, r"give_up_on to be an exception class or a tuple of"),
        ({"attempts": 3}, r"attempts to be the name of a column, got 3"),
        ({"attempts": None}, r"attempts to be the name of a column, got None"),
        ({"last_error": 3}, r"last_error to be the name of a column, or None, got 3"),
        ({"max_attempts": "allowed"}, r"max_attempts to be a whole number .* got 'allowed'"),
        ({"max_attempts": lambda row: 3}, r"max_attempts to be a whole number .* got <function"),
    ],
)
def test_bad_values_of_a_retry_are_one_clear_sentence(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=rf"^expected Retry's {words}") as refused:
        Retry(**arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("duration", [0.9, timedelta(milliseconds=999), 86_401], ids=str)
def test_a_lease_lasts_from_a_second_to_a_day(duration: Any) -> None:
    with pytest.raises(InvalidOption, match=r"Lease's duration .* from 1 to a day") as refused:
        Lease(duration)
    assert repr(duration) in str(refused.value)
    assert Lease(1).seconds == Lease(timedelta(seconds=1)).seconds == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"delay": -1}, r"delay to be a number of seconds from 0 .* got -1"),
        ({"until": 3}, r"until to be a datetime, got 3"),
        (
            {"delay": 3, "until": datetime(2024, 5, 1, tzinfo=UTC)},
            r"expected a Snooze with delay or until, got both",
        ),
    ],
)
def test_bad_values_of_a_snooze_are_one_clear_sentence(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        Snooze("not now", **arguments)


# --- the value of ``Retry``: what it takes, and the delays that it gives


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
    assert [retry.gives_up(OSError(), attempt) for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert retry.gives_up(KeyError(), 1)
    assert retry.gives_up(ConnectionResetError(), 1)
    assert not retry.gives_up(UnicodeError(), 1)
    assert not Retry(max_attempts=None).gives_up(OSError(), 99)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"retry": Retry(None, give_up_on=KeyError)},
            "expected failed=… with a Retry that gives up on some errors and has max_attempts=",
        ),
        ({"retry": Retry(None, on=OSError)}, "expected failed=…"),
    ],
    ids=str,
)
def test_a_retry_that_the_other_options_contradict_is_refused(
    options: dict[str, Any], words: str
) -> None:
    asked: dict[str, Any] = {"pending": Errand.objects.filter(done=False), "done": {"done": True}}
    with pytest.raises(ImproperlyConfigured, match=words):
        batch_processor(**asked, **options)(lambda row: None)


@pytest.mark.parametrize("failed", [{"dead": True}, lambda row, error: {"dead": True}], ids=str)
def test_without_a_limit_a_dead_letter_shows_which_rows_were_given_up(failed: Any) -> None:
    retry = Retry(None, give_up_on=KeyError)
    pending = Errand.objects.filter(done=False)
    options: dict[str, Any] = {"pending": pending, "failed": failed, "retry": retry}
    processor = batch_processor(**options, done={"done": True})(lambda row: None)
    assert processor.retry is retry


# --- another delivery, which costs a function and its rules
