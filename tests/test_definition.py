"""What is refused when a processor is defined, and what a definition looks like from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models import QuerySet, Value
from django.db.models.functions import Now

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, Snooze, batch_processor
from dcl_processor.decorator import Options
from dcl_processor.exceptions import (
    InvalidDone,
    InvalidOption,
    InvalidPending,
    ProcessorError,
    Unsupported,
)
from dcl_processor.options import validation
from tests.models import Parcel

PENDING = Parcel.objects.filter(sent=False)
DONE = {"sent": True}


def define(handler: Callable[..., Any] | None = None, **options: Any) -> BatchProcessor[Parcel]:
    def send(row: Parcel) -> str:
        """Send a parcel."""
        return f"sent {row.pk}"

    options = {"pending": PENDING, "done": DONE, **options}
    return batch_processor(**options)(handler or send)


def test_a_decorated_function_keeps_its_identity() -> None:
    send = define()
    assert isinstance(send, BatchProcessor)
    assert send.__name__ == "send"
    assert send.__doc__ == "Send a parcel."
    assert send.__module__ == __name__
    assert send.name == "tests.send"
    assert repr(send) == "<BatchProcessor tests.send>"


def test_calling_a_processor_with_a_row_says_which_of_the_two_to_use() -> None:
    words = r"expected send\(\) without a row, .* got <Parcel.*>; call send.process\(row\)"
    with pytest.raises(TypeError, match=words):
        define()(Parcel(pk=7))  # type: ignore[arg-type]  # the mistake


class SendParcels(BatchProcessor[Parcel]):
    """A class to derive from."""

    done = DONE
    name = "parcels.send"

    def pending(self) -> QuerySet[Parcel]:
        return PENDING.all()

    def process(self, row: Parcel, /) -> None: ...


class SendHeavyParcels(SendParcels):
    pass


def test_a_class_has_its_own_name_and_does_not_inherit_one() -> None:
    assert SendParcels().name == "parcels.send"
    assert SendHeavyParcels().name == "tests.SendHeavyParcels"
    assert SendHeavyParcels(name="heavy").name == "heavy"


@pytest.mark.parametrize("name", [3, None, " ", "send "])
def test_a_name_that_is_none_is_refused_in_a_class_too(name: Any) -> None:
    kind = type("Send", (SendParcels,), {"name": name})
    with pytest.raises(InvalidOption, match=r"Send: expected name to be a "):
        kind()


def test_options_of_an_instance_override_those_of_its_class() -> None:
    other = SendParcels(done={"note": "sent"}, in_order=True, group_by="depot")
    assert list(other.done or ()) == ["note"]
    assert other.in_order
    assert SendParcels().done == DONE
    assert not SendParcels().in_order


def test_a_decorator_without_its_options_is_refused_in_a_sentence() -> None:
    def send(row: Parcel) -> None: ...

    bare: Any = batch_processor
    with pytest.raises(InvalidOption, match=r"batch_processor\(pending=…, done=…\).* got <funct"):
        bare(send)


async def asynchronous(row: Parcel) -> None: ...


def lazy(row: Parcel) -> Iterator[None]:
    yield None


MOST: dict[str, Any] = {"delivery": Delivery.AT_MOST_ONCE}
LEAST: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(30)}
CLAIM = {"claimed": True}
ORDERED: dict[str, Any] = {"group_by": "depot", "in_order": True}

REFUSED: dict[type[ProcessorError], list[tuple[dict[str, Any], str]]] = {
    InvalidDone: [
        ({"done": {}}, r"expected done to name at least one column, got {}; leave it out"),
        ({"done": {1: True}}, r"expected done to be a mapping .* got {1: True}"),
        ({"done": lambda *, row: {}}, r"take \(row, result\), or \(row\) where"),
        ({"failed": "dead"}, r"expected failed to be a mapping .* got 'dead'"),
        ({"failed": lambda row: {}}, r"expected failed as a callable to take \(row, error"),
        ({"reset": True}, r"expected reset to be a mapping .* got True"),
        ({**MOST, "claim": {}}, r"expected claim to name at least one column"),
    ],
    InvalidPending: [
        ({"pending": None}, r"expected pending to be a queryset .* got None"),
        ({"pending": Parcel}, r"got <class 'tests.models.Parcel'>; write …objects"),
        (
            {"pending": lambda tenant: PENDING},
            r"expected pending to take no arguments, got pending\(tenant\); .* filter=Q",
        ),
    ],
    Unsupported: [
        ({"handler": asynchronous}, r"expected a plain function, got 'async def asyn"),
        ({"process_batch": asynchronous}, "got 'async def asynchronous'; write 'def', or an async"),
        ({"process_batch": len, **MOST}, r"process\(\) with AT_MOST_ONCE, got process_batch"),
        ({"max_in_flight": 2, **MOST}, "expected no max_in_flight with AT_MOST_ONCE"),
        ({**ORDERED, "max_per_group": 2}, "max_per_group=1 or None with"),
        ({**ORDERED, "batch_size": 2}, "batch_size=1 with in_order"),
        ({"group_by": "depot", "process_batch": len}, r"write a processor over the parent"),
    ],
    InvalidOption: [
        ({"batch_size": 0}, r"expected batch_size .* from 1, got 0"),
        ({"delivery": "exactly_once"}, r"transactional, .* got 'exactly_once'"),
        ({"delivery": []}, r"transactional, .* got \[\]"),
        ({"in_order": "yes"}, r"expected in_order to be True or False"),
        ({"using": 3}, r"expected using to be the name of a database .* got 3"),
        ({"bach_size": 3}, r"no option 'bach_size'; did you mean 'batch_size'\?"),
        ({"zzz": 3}, r"no option 'zzz'; the options are .*delivery.*"),
        ({"_has_fixed_flip": 3}, r"no option '_has_fixed_flip'"),
        ({"requeue": None}, r"no option 'requeue'"),
        ({"limit": 5}, r"no option 'limit'; it is a parameter of a run: .*\.run\(limit=…\)"),
        ({"handler": lazy}, r"got the generator lazy\(\); remove the 'yield'"),
        ({"handler": lambda row, more: None}, r"handler to take one row, got"),
        ({"process": print}, r"expected the decorated function to be the handler, got"),
        ({"retry": 3}, r"expected retry to be a Retry, such as .*, got 3"),
        ({"lease": 30}, r"expected lease to be a Lease, such as .*, got 30"),
        ({"claimed_at": 3}, r"expected claimed_at to be the name of a column, got 3"),
        ({"pending_since": 3}, "expected pending_since to be the name of a column"),
        ({"concurrency": None}, r"a whole number of handlers from 1, got None"),
        ({"max_consecutive_failures": -1}, r"rows from 0, got -1; with 0, fail"),
        ({"max_pending": 0}, r"max_pending to be a whole number of rows from 1, got 0"),
        ({"handler_timeout": 0.01}, "handler_timeout to be a number of s"),
        ({"max_in_flight": 1.5}, "max_in_flight to be a whole number of rows"),
        ({"gates": [object()]}, r"gates to be a list of objects with may_start\(\) and ended\(\)"),
        ({"observers": [object()]}, r"observers to be a list of objects with run\(\) and row\(\)"),
        ({"gates": object()}, "expected gates to be a list"),
        ({"resource": 7}, r"expected resource to be a callable without arguments .* 7"),
        ({"resource": lambda row: None}, r"expected resource to be a callable without"),
        (
            {"resource": nullcontext, "handler": lambda row: None},
            r"expected the handler to take one row and the resource, got <lambda>\(row\)",
        ),
        ({"process_batch": lambda: None}, r"expected the handler to take rows, got <lambda>\(\)"),
        (
            {"process_batch": lambda rows: None, "resource": nullcontext},
            r"expected the handler to take rows and the resource, got <lambda>\(rows\)",
        ),
        ({"group_by": 1}, "the name of a column"),
        ({"in_order": True}, "expected in_order together with group_by"),
        ({"max_per_group": 2}, "expected max_per_group together with group_by"),
        ({"group_by": "depot", "max_per_group": 0}, "a whole number of rows in flight from 1"),
        ({"group_by": "depot", **MOST}, "claim=… and claimed_at=… with group_by"),
        ({"lease": Lease(30)}, r"expected no lease with TRANSACTIONAL, got lease="),
        ({"claim": CLAIM}, r"expected no claim with TRANSACTIONAL"),
        ({"claimed_at": "claimed_at"}, r"expected no claimed_at with TRANSACTIONAL"),
        ({**LEAST, **MOST}, r"expected no lease with AT_MOST_ONCE"),
        ({**LEAST, "lease": None}, r"expected lease=Lease\(…\) with AT_LEAST_ONCE, got None"),
        ({**LEAST, "claim": CLAIM}, r"expected reset=… together with claim and a lease, got no"),
        ({**LEAST, "claimed_at": "since"}, r"expected claimed_at together with claim=…, got AT_L"),
        ({**MOST, "claimed_at": "since"}, r"expected claimed_at together with claim=…"),
        ({**MOST, "claim": DONE}, r"expected claim to differ from done, .* got {'sent': True} for"),
        (
            {**MOST, "done": lambda row, result: DONE},
            r"expected done=… to be a mapping with AT_MOST_ONCE .* add claim=…",
        ),
        ({**MOST, "retry": Retry()}, r"expected retry together with claim=…"),
        (
            {**MOST, "claim": CLAIM, "retry": Retry()},
            r"expected reset=… together with claim and retry, got no reset",
        ),
        (
            {**MOST, "claim": {"claimed_at": Now()}},
            r"expected claim to have at least one constant, .* got {'claimed_at': .*}; .* claim",
        ),
        (
            {"retry": Retry(None, give_up_on=KeyError)},
            "expected failed=… with a Retry that gives up on some errors and has max_attempts=",
        ),
    ],
}
ALL = [(options, error, words) for error, some in REFUSED.items() for options, words in some]


@pytest.mark.parametrize(("options", "error", "words"), ALL, ids=[words for *_, words in ALL])
def test_bad_input_is_one_clear_sentence_at_definition(
    options: dict[str, Any], error: type[ProcessorError], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        define(**options)
    assert isinstance(refused.value, ImproperlyConfigured)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [*Options.__annotations__])
def test_each_option_is_looked_at(name: str) -> None:
    options: dict[str, Any] = {name: object()}
    with pytest.raises(ProcessorError, match=name):
        define(**options)


def test_a_class_without_its_methods_is_refused() -> None:
    class Nothing(BatchProcessor[Parcel]):
        done = DONE

    words = r"expected the methods pending\(self\) and process\(self, row\), got no pending and no"
    with pytest.raises(InvalidOption, match=words):
        Nothing()


def test_the_name_is_known_before_the_apps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.apps import apps

    monkeypatch.setattr(apps, "apps_ready", False)
    assert define().name == f"{__name__}.send"


def test_a_handler_without_a_name_is_told_where_to_go() -> None:
    with pytest.raises(InvalidOption, match=r"expected the handler to be a function, .* got func"):
        define(functools.partial(print, "sent"))
    with pytest.raises(InvalidOption, match=r"expected the handler to be a function, .* got <buil"):
        define([].append)
    send = SendParcels(process=functools.partial(print, "sent"), name="sent")
    assert send.name == "sent"


@pytest.mark.parametrize("name", ["delivry", "names", "process_one", "limit", "queryset"])
def test_attributes_of_a_class_are_its_own(name: str) -> None:
    kinds: list[Any] = [3, lambda self: 3, property(lambda self: 3)]
    for each in kinds:
        assert type("Send", (SendParcels,), {name: each})().done == DONE


@pytest.mark.parametrize("make", [SendParcels, define])
def test_a_name_of_other_queues_is_refused_with_what_to_write_instead(make: Any) -> None:
    for name, instead in validation.OF_OTHERS.items():
        with pytest.raises(InvalidOption) as refused:
            make(**{name: 3})
        assert str(refused.value).endswith(f" has no option {name!r}; {instead}.")
    assert not [name for name in validation.OF_OTHERS if hasattr(SendParcels, name)]


def test_a_get_done_of_the_class_is_a_flip_that_depends_on_the_handler() -> None:
    class Flipping(SendParcels):
        delivery = Delivery.AT_MOST_ONCE

        def get_done(self, row: Parcel, result: Any, /) -> dict[str, Any]:
            return {"sent": True, "note": result}

    words = r"^Flipping: expected done=… to be a mapping with AT_MOST_ONCE"
    with pytest.raises(InvalidOption, match=words):
        Flipping()
    assert Flipping(claim=CLAIM).claim == CLAIM


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_attempts": 0}, r"max_attempts to be a whole number of attempts from 1, got 0"),
        ({"backoff": -1}, r"backoff to be a number of seconds from 0 .* got -1"),
        ({"max_delay": 1e300}, r"max_delay to be a number of seconds from 0 to ten years, or a"),
        ({"jitter": -0.1}, r"jitter to be a number from 0 to 1, got -0.1"),
        ({"on": [ValueError]}, r"on to be an exception class or a tuple of them, got \[<class"),
        ({"give_up_on": (ValueError, 3)}, r"give_up_on to be an exception class or a tuple of"),
        ({"attempts": None}, r"attempts to be the name of a column, got None"),
        ({"last_error": 3}, r"last_error to be the name of a column, or None, got 3"),
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
