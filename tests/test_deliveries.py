"""Which options go with which delivery, and what ``Retry``, ``Lease`` and ``Snooze`` take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
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


async def run_later(row: Errand) -> None: ...


async def run_all_later(rows: Sequence[Errand]) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"retry": Retry(), "failed": {"dead": True}},
        {"process_batch": lambda rows: None, "batch_size": 9},
        {"delivery": MOST},
        {"delivery": "at_most_once"},
        {"delivery": MOST, "handler": run_later, "batch_size": 9},
        {"delivery": MOST, "claim": CLAIM, "done": lambda row, result: {"result": result}},
        {"delivery": MOST, "claim": CLAIM, "done": None},
        {"delivery": MOST, "claim": CLAIM, "claimed_at": "claimed_at"},
        {"delivery": MOST, "claim": CLAIM, "retry": Retry(), "reset": RESET},
        {"delivery": MOST, "claim": {**CLAIM, "result": lambda: "x"}},
        {"delivery": LEAST, "lease": LEASE},
        {"delivery": LEAST, "lease": LEASE, "retry": Retry(), "handler": run_later},
        {"delivery": LEAST, "lease": LEASE, "claim": CLAIM, "reset": RESET},
        {"delivery": LEAST, "lease": LEASE, "claim": {"result": lambda: "x"}, "reset": RESET},
        {"delivery": MOST, "process_batch": lambda rows: None, "batch_size": 9},
        {"delivery": LEAST, "lease": LEASE, "process_batch": lambda rows: None},
        {"delivery": LEAST, "lease": LEASE, "process_batch": run_all_later},
    ],
    ids=str,
)
def test_what_goes_together_is_taken(options: dict[str, Any]) -> None:
    processor = define(**options)
    assert processor.delivery == options.get("delivery", Delivery.TRANSACTIONAL)


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
    ({"delivery": MOST, "done": None}, r"expected done=… to be a mapping with AT_MOST_ONCE"),
    ({"delivery": MOST, "retry": Retry()}, r"expected retry together with claim=…"),
    ({"delivery": MOST, "claimed_at": "claimed_at"}, r"expected claimed_at together with claim=…"),
    (
        {"delivery": MOST, "claim": CLAIM, "retry": Retry()},
        r"expected reset=… together with retry, got retry alone",
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
        ({"max_attempts": True}, r"max_attempts to be a whole number of attempts from 1, got True"),
        ({"max_attempts": 2.5}, r"max_attempts to be a whole number of attempts from 1, got 2.5"),
        ({"backoff": -1}, r"backoff to be a number of seconds from 0 .* got -1"),
        ({"backoff": "30"}, r"backoff to be a number of seconds from 0 .* got '30'"),
        ({"backoff": timedelta(seconds=-1)}, r"backoff to be a number of seconds from 0"),
        ({"backoff": float("nan")}, r"backoff to be a number of seconds from 0 .* got nan"),
        ({"max_delay": float("inf")}, r"max_delay to be a number of seconds .* got inf"),
        ({"max_delay": 1e300}, r"max_delay to be a number of seconds from 0 to ten years, or a"),
        ({"max_delay": None}, r"max_delay to be a number of seconds from 0 .* got None"),
        ({"jitter": -0.1}, r"jitter to be a number from 0 to 1, got -0.1"),
        ({"jitter": 2}, r"jitter to be a number from 0 to 1, got 2"),
        ({"jitter": "0.1"}, r"jitter to be a number from 0 to 1, got '0.1'"),
        ({"jitter": True}, r"jitter to be a number from 0 to 1, got True"),
        ({"on": "ValueError"}, r"on to be an exception class or a tuple of them, got 'ValueErr"),
        ({"on": [ValueError]}, r"on to be an exception class or a tuple of them, got \[<class"),
        ({"give_up_on": (ValueError, 3)}, r"give_up_on to be an exception class or a tuple of"),
        ({"give_up_on": ValueError()}, r"give_up_on to be an exception class or a tuple of them"),
        ({"attempts": 3}, r"attempts to be the name of a column, or None, got 3"),
        ({"next_attempt_at": 1}, r"next_attempt_at to be the name of a column, or None, got 1"),
        ({"last_error": []}, r"last_error to be the name of a column, or None, got \[\]"),
    ],
)
def test_bad_values_of_a_retry_are_one_clear_sentence(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=rf"^expected Retry's {words}") as refused:
        Retry(**arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "duration",
    [0.9, 0, -5, "30", None, True, timedelta(milliseconds=999), float("nan"), float("inf"), 1e9],
    ids=str,
)
def test_a_lease_lasts_from_a_second_to_a_day(duration: Any) -> None:
    with pytest.raises(InvalidOption, match=r"Lease's duration .* from 1 to a day") as refused:
        Lease(duration)
    assert repr(duration) in str(refused.value)
    assert Lease(1).seconds == Lease(timedelta(seconds=1)).seconds == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"delay": "soon"}, r"delay to be a number of seconds from 0 .* got 'soon'"),
        ({"delay": -1}, r"delay to be a number of seconds from 0 .* got -1"),
        ({"delay": float("inf")}, r"delay to be a number of seconds from 0 .* got inf"),
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
