"""Errands, and processors of them for each delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from threading import enumerate as living_threads
from typing import Any, TypeVar

import pytest
from django.db import connection, connections
from django.db.models import Q

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests import waiting
from tests.models import Errand

T = TypeVar("T")

PATIENCE, wait = waiting.PATIENCE, waiting.wait

PENDING = Errand.objects.filter(done=False, dead=False, claimed=False)


def errands(number: int, **values: Any) -> list[Errand]:
    """Make errands whose ``place`` is their place; return all that there are."""
    Errand.objects.bulk_create([Errand(place=place, **values) for place in range(number)])
    return list(Errand.objects.order_by("pk"))


def transactional(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor of the pending errands, with the default delivery unless told otherwise."""
    options = {"pending": PENDING, "done": {"done": True}, **options}
    return batch_processor(**options)(handler)


def at_most_once(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor with a ``claim``; the option ``claim=None`` makes one without it."""
    claim = {"claim": {"claimed": True}, "claimed_at": "claimed_at"}
    return transactional(handler, **{"delivery": Delivery.AT_MOST_ONCE, **claim, **options})


def at_least_once(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that leases its rows for a minute."""
    lease = {"lease": Lease(60)}
    return transactional(handler, **{"delivery": Delivery.AT_LEAST_ONCE, **lease, **options})


Make = Callable[..., BatchProcessor[Errand]]

each_delivery = pytest.mark.parametrize("make", [at_most_once, at_least_once])
all_deliveries = pytest.mark.parametrize("make", [transactional, at_most_once, at_least_once])


#: Every pending question in two kinds: claimed in one statement where that can be, and never.
QUESTIONS = {
    "own": lambda: PENDING,
    "spanning": lambda: PENDING.filter(pk__in=Errand.objects.filter(done=False).values("pk")),
}
each_question = pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
each_size = pytest.mark.parametrize("size", [1, 3])


def retry(**options: Any) -> Retry:
    return Retry(**{"max_attempts": 3, "backoff": 0, "jitter": 0, **options})


def retried(make: Make, **options: Any) -> dict[str, Any]:
    """Return the options with which processors of a kind try a row again."""
    reset = {"reset": {"claimed": False}} if make is at_most_once else {}
    return {"retry": retry(**options), **reset}


def proven(processor: BatchProcessor[Errand]) -> BatchProcessor[Errand]:
    """Have one row settled, after which others start together."""
    first = Errand.objects.create(place=-1)
    assert processor(filter=only(first)).processed == 1
    first.delete()
    return processor


def only(row: Any) -> Q:
    """Narrow a run to one row."""
    return Q(pk=row.pk)


def ignore(row: Any) -> None:
    """Handle a row by doing nothing."""


def with_result(row: Errand, result: Any) -> dict[str, Any]:
    """Return a flip that keeps what the handler returned."""
    return {"done": True, "result": str(result)}


def raising(error: BaseException) -> Callable[[Any], None]:
    """Return a handler that raises this for every row, or call."""

    def handle(_: Any) -> None:
        raise error

    return handle


def elsewhere(act: Callable[[], T]) -> T:
    """Do something in a thread and on connections of its own, and wait for it."""
    with meanwhile(act) as results:
        pass
    result: T = answer(results)
    return result


def answer(results: list[Any]) -> Any:
    """Return what the thread of ``meanwhile`` returned, or raise what it raised."""
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@contextmanager
def meanwhile(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run something in another thread until the block's end; its results are in the list then."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001  # looked at by the test
            results.append(error)
        finally:
            connections.close_all()

    thread = Thread(target=work)
    thread.start()
    try:
        yield results
    finally:
        waiting.join(thread)


def state(row: Errand) -> dict[str, Any]:
    fresh = Errand.objects.get(pk=row.pk)
    names = ("done", "dead", "claimed", "result", "attempts")
    marks = ("claimed_at", "leased_until")
    said = {name: getattr(fresh, name) for name in names}
    return {**said, **{name: getattr(fresh, name) is not None for name in marks}}


def untouched(row: Errand) -> bool:
    """Tell whether the row says what a row says that was never claimed."""
    return state(row) == {
        "done": False,
        "dead": False,
        "claimed": False,
        "result": "",
        "attempts": 0,
        "claimed_at": False,
        "leased_until": False,
    }


def places(**values: Any) -> list[int]:
    """Return the places of the errands with these values."""
    return list(Errand.objects.filter(**values).order_by("place").values_list("place", flat=True))


def our_threads() -> list[str]:
    """Return the names of threads that a run left behind."""
    # One whose start was interrupted stays in the list, and never lived.
    threads = [thread for thread in living_threads() if thread.is_alive()]
    return [thread.name for thread in threads if thread.name.startswith("tests.")]


def sessions(using: str = "default") -> set[int]:
    """Return the numbers of the sessions of the test database, where it can tell.

    A test compares the sessions themselves: those of the test before may still be on the list. A
    server takes a session off it when it has released the session's locks. MariaDB's list of
    transactions would not do: it is a copy that may be 0.1 s old.
    """
    asked = {
        "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'",
        "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE()",
    }
    if connection.vendor not in asked:
        return set()
    with connections[using].cursor() as cursor:
        cursor.execute(asked[connection.vendor])
        return {number for (number,) in cursor.fetchall()}
