"""What is refused when a processor is defined, and what a definition looks like from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models import QuerySet

from dcl_processor import BatchProcessor, batch_processor
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
    with pytest.raises(InvalidPending, match=r"expected pending to be a queryset .* got None"):
        bare(done=DONE)(send)


def test_partials_and_callable_objects_are_handlers_of_a_class() -> None:
    def handler(prefix: str, row: Parcel) -> str:
        return f"{prefix} {row.pk}"

    send = SendParcels(process=functools.partial(handler, "sent"))
    assert send.process(Parcel(pk=1)) == "sent 1"  # type: ignore[func-returns-value]


async def asynchronous(row: Parcel) -> None: ...


def lazy(row: Parcel) -> Iterator[None]:
    yield None


REFUSED: list[tuple[dict[str, Any], type[ProcessorError], str]] = [
    ({"done": {}}, InvalidDone, r"expected done to name at least one column, got {}; leave it out"),
    ({"done": "sent"}, InvalidDone, r"expected done to be a mapping .* got 'sent'"),
    ({"done": {1: True}}, InvalidDone, r"expected done to be a mapping .* got {1: True}"),
    ({"done": lambda *, row: {}}, InvalidDone, r"take \(row, result\), or \(row\) where"),
    ({"pending": None}, InvalidPending, r"expected pending to be a queryset .* got None"),
    ({"pending": Parcel.objects}, InvalidPending, r"got <.*Manager.*>; write …objects.filter"),
    ({"pending": Parcel}, InvalidPending, r"got <class 'tests.models.Parcel'>; write …objects"),
    (
        {"pending": lambda tenant: PENDING},
        InvalidPending,
        r"expected pending to take no arguments, got pending\(tenant\); .* filter=Q",
    ),
    ({"batch_size": 0}, InvalidOption, r"expected batch_size .* from 1, got 0"),
    ({"delivery": "exactly_once"}, InvalidOption, r"transactional, .* got 'exactly_once'"),
    ({"delivery": []}, InvalidOption, r"transactional, .* got \[\]"),
    ({"in_order": "yes"}, InvalidOption, r"expected in_order to be True or False"),
    ({"using": 3}, InvalidOption, r"expected using to be the name of a database .* got 3"),
    ({"bach_size": 3}, InvalidOption, r"no option 'bach_size'; did you mean 'batch_size'\?"),
    ({"zzz": 3}, InvalidOption, r"no option 'zzz'; the options are .*delivery.*"),
    ({"_has_fixed_flip": 3}, InvalidOption, r"no option '_has_fixed_flip'"),
    ({"handler": asynchronous}, Unsupported, r"expected a plain function, got 'async def asyn"),
    ({"handler": lazy}, InvalidOption, r"got the generator lazy\(\); remove the 'yield'"),
    ({"handler": lambda row, more: None}, InvalidOption, r"handler to take one row, got"),
    ({"process": print}, InvalidOption, r"expected the decorated function to be the handler, got"),
    ({"failed": "dead"}, InvalidDone, r"expected failed to be a mapping .* got 'dead'"),
    (
        {"failed": lambda row: {}},
        InvalidDone,
        r"expected failed as a callable to take \(row, error",
    ),
    ({"reset": True}, InvalidDone, r"expected reset to be a mapping .* got True"),
    ({"retry": 3}, InvalidOption, r"expected retry to be a Retry, such as .*, got 3"),
    ({"lease": 30}, InvalidOption, r"expected lease to be a Lease, such as .*, got 30"),
    ({"claimed_at": 3}, InvalidOption, r"expected claimed_at to be the name of a column, got 3"),
    ({"concurrency": None}, InvalidOption, r"a whole number of handlers from 1, got None"),
    ({"max_consecutive_failures": -1}, InvalidOption, r"rows from 0, got -1; with 0, fail"),
    ({"max_pending": 0}, InvalidOption, r"max_pending to be a whole number of rows from 1, got 0"),
    ({"resource": 7}, InvalidOption, r"expected resource to be a callable without arguments .* 7"),
    ({"resource": lambda row: None}, InvalidOption, r"expected resource to be a callable without"),
    (
        {"resource": nullcontext, "handler": lambda row: None},
        InvalidOption,
        r"expected the handler to take one row and the resource, got <lambda>\(row\)",
    ),
    (
        {"process_batch": lambda: None},
        InvalidOption,
        r"expected the handler to take rows, got <lambda>\(\)",
    ),
    (
        {"process_batch": lambda rows: None, "resource": nullcontext},
        InvalidOption,
        r"expected the handler to take rows and the resource, got <lambda>\(rows\)",
    ),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=[w for _, _, w in REFUSED])
def test_bad_input_is_one_clear_sentence_at_definition(
    options: dict[str, Any], error: type[ProcessorError], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        define(**options)
    assert isinstance(refused.value, ImproperlyConfigured)
    assert "\n" not in str(refused.value)


def test_a_class_without_its_methods_is_refused() -> None:
    class Nothing(BatchProcessor[Parcel]):
        done = DONE

    words = r"expected the methods pending\(self\) and process\(self, row\), got no pending and no"
    with pytest.raises(InvalidOption, match=words):
        Nothing()


def test_a_value_that_is_called_at_the_flip_is_no_misuse() -> None:
    assert define(done={"sent": True, "note": lambda: "x"}).done is not None
    assert define(done=lambda row, result: {}).done is None
    assert define(done=lambda row: {}).done is None
    assert define(done=None).done is None


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


def test_a_parameter_of_a_run_is_no_option_and_said_to_be_one() -> None:
    words = r"has no option 'limit'; it is a parameter of a run: .*\.run\(limit=…\)"
    with pytest.raises(InvalidOption, match=words):
        define(limit=5)


def test_methods_are_neither_options_nor_listed_as_such() -> None:
    with pytest.raises(InvalidOption, match="has no option 'requeue'"):
        define(requeue=None)
    with pytest.raises(InvalidOption) as info:
        define(xyzzy=None)
    listed = str(info.value).partition("the options are ")[2].rstrip(".").split(", ")
    assert {"done", "concurrency", "pending", "get_done"} <= set(listed)
    assert not {"run", "in_doubt", "mark_done", "requeue", "wake"} & set(listed)


@pytest.mark.parametrize("make", [SendParcels, define])
def test_a_name_of_other_queues_is_refused_with_what_to_write_instead(make: Any) -> None:
    for name, instead in validation.OF_OTHERS.items():
        with pytest.raises(InvalidOption) as refused:
            make(**{name: 3})
        assert str(refused.value).endswith(f" has no option {name!r}; {instead}.")
    assert not [name for name in validation.OF_OTHERS if hasattr(SendParcels, name)]
