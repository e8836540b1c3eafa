"""A handler that runs processors: another one it may, its own it may not."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import InsideTransaction, Unsupported
from tests.contract.support import errands as the
from tests.contract.support.batches import sent
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@the.each_delivery
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_inside_a_run_of_the_same_processor_is_refused(make: Any, concurrency: int) -> None:
    the.errands(20)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        with pytest.raises(Unsupported, match="expected the handler not to run its own processor"):
            run()

    run: BatchProcessor[Errand] = make(handle)
    assert_run(run(concurrency=concurrency), processed=20)
    assert sorted(calls) == list(range(20))
    assert_run(run())  # and it does not count as running after its end


@the.each_delivery
def test_it_is_refused_from_an_asynchronous_handler_too(make: Any) -> None:
    the.errands(5)

    async def handle(row: Errand) -> None:
        await sync_to_async(run)()

    run: BatchProcessor[Errand] = make(handle)
    report = run(concurrency=2)
    assert_run(report, failed=5)
    assert all(isinstance(each.error, Unsupported) for each in report.failures)


def test_it_is_refused_through_another_processor() -> None:
    the.errands(4)
    parcels(2)
    errors: list[Exception] = []

    def one(row: Errand) -> None:
        other()

    def two(row: Any) -> None:
        try:
            run()
        except Unsupported as error:
            errors.append(error)
            raise

    run = the.at_least_once(one)
    other = in_batches(two, batch_size=1)
    assert_run(run(), processed=4)
    assert len(errors) == 2 * 4
    assert sent() == []


def test_another_processor_may_be_run() -> None:
    the.errands(4)
    parcels(2)
    other = in_batches(lambda row: None)
    assert_run(the.at_least_once(lambda row: other().ok)(), processed=4)
    assert sent() == [0, 1]


def test_the_default_delivery_says_that_a_transaction_is_open() -> None:
    parcels(2)
    other = in_batches(lambda row: None)
    report = in_batches(lambda row: other())()
    assert [type(each.error) for each in report.failures] == [InsideTransaction] * 2


@pytest.mark.parametrize(
    ("module", "asked", "what"),
    [
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_an_event_loop_is_refused_where_threads_are_greenlets(
    module: str, asked: str, what: str, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    the.errands(2)
    calls: list[int] = []

    async def handle(row: Errand) -> None:
        calls.append(row.place)

    stand_in = SimpleNamespace(**{asked: lambda name: patched and name == what})
    monkeypatch.setitem(sys.modules, module, stand_in)
    run = the.at_least_once(handle)
    if patched:
        with pytest.raises(Unsupported, match=r"patched by (gevent|eventlet); write"):
            run()
        assert_run(the.at_least_once(the.ignore)(concurrency=2), processed=2)
    else:
        assert_run(run(), processed=2)
    assert calls == ([] if patched else [0, 1])
