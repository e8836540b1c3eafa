"""What a row costs: statements, round trips and transactions, counted where they are sent.

libpq itself writes down every message, which may have several statements. A statement is what
neither begins nor ends a transaction or a savepoint; a round trip is a message that is answered
before the next is sent. What a run costs once, its look at the candidates and the trial, falls out
of the difference between a long run and a short one.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import Exists, OuterRef
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.contrib.otel import Spans
from dcl_processor.contrib.prometheus import Counts
from dcl_processor.ledger.apps import of_run
from dcl_processor.operator import registry
from dcl_processor.report import observer
from tests.calls import calls_of_a_batched_row, ways
from tests.contract.support.reports import assert_run
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

ENDS = ("COMMIT", "ROLLBACK")
SENT = re.compile(r'\tF\t\d+\tQuery\t "(?P<sql>.*)"$')
FLAGS = 1  # no time stamps
BRACKETS = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")


@dataclass(frozen=True, slots=True)
class Cost:
    statements: float
    round_trips: float
    transactions: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.statements - other.statements,
            self.round_trips - other.round_trips,
            self.transactions - other.transactions,
        )

    def __truediv__(self, number: int) -> Cost:
        return Cost(self.statements / number, self.round_trips / number, self.transactions / number)


@contextmanager
def traced() -> Iterator[list[str]]:
    """Collect what is sent to the server in the block."""
    sent: list[str] = []
    connection.ensure_connection()
    driver: Any = connection.connection
    with tempfile.TemporaryFile("w+") as file:
        driver.pgconn.trace(file.fileno())
        driver.pgconn.set_trace_flags(FLAGS)
        try:
            yield sent
        finally:
            driver.pgconn.untrace()
        file.seek(0)
        sent += [found["sql"] for line in file if (found := SENT.search("\t" + line.rstrip()))]


def cost(act: Callable[[], Any]) -> Cost:
    with traced() as sent:
        act()
    statements = begun = alone = 0
    inside = False
    for message in sent:
        writes = False
        for sql in message.split("; "):
            begun += sql.startswith("BEGIN")
            statements += not sql.startswith(BRACKETS)
            inside = sql.startswith("BEGIN") or (inside and not sql.startswith(ENDS))
            only_reads = sql.startswith("SELECT") and "FOR NO KEY" not in sql
            writes |= not inside and not only_reads and not sql.startswith(BRACKETS)
        # What a message has outside BEGIN and COMMIT is a transaction of its own; what only reads
        # leaves nothing to commit, and is not counted.
        alone += writes
    return Cost(statements, len(sent), begun + alone)


def per_row(
    act: Callable[[int], None], make: Callable[[int], None], rows: int, few: int = 2
) -> Cost:
    """Return what each further row costs; ``act``: handles so many rows."""
    make(few)
    act(few)  # what is done once on a connection is not counted
    make(few)
    short = cost(lambda: act(few))
    make(few + rows)
    long = cost(lambda: act(few + rows))
    return (long - short) / rows


def run(processor: BatchProcessor[Any], rows: int) -> None:
    assert_run(processor(), processed=rows)


def parcels(number: int) -> None:
    Parcel.objects.all().delete()
    Parcel.objects.bulk_create(Parcel() for _ in range(number))


def errands(number: int) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(place=place) for place in range(number))


def ignore(row: Any) -> None: ...


def transactional(**options: Any) -> BatchProcessor[Any]:
    options = {"pending": Parcel.objects.filter(sent=False), "done": {"sent": True}, **options}
    return batch_processor(**options)(ignore)


def outside(**options: Any) -> BatchProcessor[Any]:
    options = {"pending": ERRANDS.filter(claimed=False), "done": {"done": True}, **options}
    return batch_processor(**options)(ignore)


PARCELS = Parcel.objects.filter(sent=False)
ERRANDS = Errand.objects.filter(done=False)
SPANNING = Parcel.objects.filter(sent=False).exclude(
    Exists(Depot.objects.filter(pk=OuterRef("depot"), name="closed"))
)
CLAIM = {"claim": {"claimed": True}, "claimed_at": "claimed_at"}


@pytest.mark.parametrize(
    ("processor", "make", "expected"),
    [
        # BEGIN, and lock and ask; flip, and COMMIT
        (transactional(), parcels, Cost(2, 2, 1)),
        # lock, ask; flip, ask again
        (transactional(pending=SPANNING), parcels, Cost(4, 2, 1)),
        # claim and flip in one
        (transactional(delivery=Delivery.AT_MOST_ONCE), parcels, Cost(1, 1, 1)),
        # claim, and settle
        (outside(delivery=Delivery.AT_MOST_ONCE, **CLAIM), errands, Cost(2, 2, 2)),
        (outside(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60)), errands, Cost(2, 2, 2)),
    ],
    ids=["transactional", "spanning", "at_most_once", "claimed", "at_least_once"],
)
def test_what_a_row_costs(
    processor: BatchProcessor[Any], make: Callable[[int], None], expected: Cost
) -> None:
    assert per_row(partial(run, processor), make, 20) == expected


@pytest.mark.parametrize("size", [10, 100])
def test_a_batch_costs_what_one_row_does(size: int) -> None:
    """For the handlers that do nothing in the database."""
    act = partial(run, transactional(batch_size=size))
    assert per_row(act, parcels, 2 * size, few=2 * size) == Cost(2, 2, 1) / size


KINDS: list[Any] = [
    pytest.param(transactional, {}, parcels, 3, id="transactional"),
    pytest.param(transactional, {"delivery": Delivery.AT_MOST_ONCE}, parcels, 2, id="flip first"),
    pytest.param(outside, {"delivery": Delivery.AT_MOST_ONCE, **CLAIM}, errands, 3, id="claimed"),
    pytest.param(
        outside, {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}, errands, 3, id="leased"
    ),
]


@pytest.mark.parametrize(("define", "options", "make", "most"), KINDS)
def test_a_run_of_one_row_is_a_few_messages(
    define: Any, options: Any, make: Callable[[int], None], most: int
) -> None:
    """The read, the claim and the flip; before the first handler of a process also the trial."""
    processor = define(**options)
    make(1)
    first = cost(lambda: run(processor, 1))
    make(1)
    assert cost(lambda: run(processor, 1)).round_trips == most
    # A mark is tried in a transaction of its own: BEGIN and lock, try, try the flip, ROLLBACK.
    assert first.round_trips <= most + (1 if define is transactional and not options else 4)


def test_the_command_sends_what_a_direct_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = transactional()
    monkeypatch.setattr(registry, "get", lambda _: [processor])
    for _ in range(2):
        parcels(1)
        spent = cost(lambda: call_command("processors", "run", processor.name, stdout=StringIO()))
    assert Parcel.objects.filter(sent=True).count() == 1
    assert spent.round_trips <= 4


def test_an_empty_run_costs_one_look() -> None:
    assert cost(transactional()) == Cost(1, 1, 0)
    assert cost(transactional(pending=SPANNING)) == Cost(1, 1, 0)
    assert cost(outside(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60))) == Cost(1, 1, 0)


def test_the_ledger_that_is_off_and_metrics_and_traces_that_are_on_send_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, tracer = Counts(CollectorRegistry()), TracerProvider().get_tracer("tests")
    processor = transactional(pending_since="sent_at")

    def spent(*installed: Any) -> Cost:
        monkeypatch.setattr(observer, "observers_installed", [*installed])
        parcels(10)
        return cost(lambda: run(processor, 10))

    spent()  # what is done once on a connection is not counted
    watched = spent(lambda _: counts, lambda _: Spans(tracer))
    assert spent() == spent(of_run) == watched


@contextmanager
def held(number: int) -> Iterator[None]:
    """Have another copy at work on the first rows."""
    other = Parcel.objects.using("other").order_by("pk")
    with transaction.atomic(using="other"):
        assert len(other.select_for_update(no_key=True)[:number]) == number
        yield


def test_rows_that_another_copy_has_are_passed_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A claim that finds no row free tells of all that it could have chosen."""
    monkeypatch.setattr(secrets, "randbelow", lambda number: 0)
    parcels(120)
    impatient = transactional()
    with held(110):
        long = cost(lambda: impatient(wait_for_locked=0))
    parcels(120)
    with held(10):
        short = cost(lambda: impatient(wait_for_locked=0))
    # The shorter run has got 100 rows more.
    each = (long.statements - short.statements + 2 * 100) / 100
    assert 0 < each <= 0.16


@pytest.mark.parametrize("part", [0, 2], ids=["at its head", "in its middle"])
def test_a_whole_window_that_another_copy_has_is_passed_in_a_few_statements(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Where the copy goes on in the window is random, and each place has a number of its own."""
    monkeypatch.setattr(secrets, "randbelow", lambda number: number // part if part else 0)
    parcels(600)
    with held(600):
        spent = cost(lambda: transactional()(wait_for_locked=0))
    assert spent.statements <= 600 / 15


# --- one row's way through the package does not get longer


#: Calls and files at most.
MOST = {
    "transactional": (60, 16),
    "transactional, spanning": (67, 16),
    "at most once": (80, 22),
    "at least once": (108, 26),
}


def test_a_row_takes_no_more_calls_and_files_than_it_did() -> None:
    found = ways()
    assert found.keys() == MOST.keys()
    longer = {
        name: (len(way.calls), way.files)
        for name, way in found.items()
        if len(way.calls) > MOST[name][0] or way.files > MOST[name][1]
    }
    assert not longer


def test_a_row_of_a_batch_takes_few_calls_django_and_driver_included() -> None:
    assert calls_of_a_batched_row(500) <= 62
