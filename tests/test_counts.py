"""What a row costs: statements, round trips and transactions, counted where they are sent.

libpq itself writes down every message. A statement is what is neither BEGIN nor COMMIT; a round
trip is a message that is answered before the next is sent. What a run costs once, its look at the
candidates and the rehearsal, falls out of the difference between a long run and a short one.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Exists, OuterRef

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SENT = re.compile(r'\tF\t\d+\tQuery\t "(?P<sql>.*)"$')
FLAGS = 1  # no time stamps
BRACKETS = ("BEGIN", "COMMIT", "ROLLBACK")


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
    statements = [sql for sql in sent if not sql.startswith(BRACKETS)]
    inside = False
    alone = 0
    for sql in sent:
        inside = sql.startswith("BEGIN") or (inside and not sql.startswith(BRACKETS))
        alone += not inside and not sql.startswith(BRACKETS)
    # A statement outside BEGIN and COMMIT is a transaction of its own; one that only reads leaves
    # nothing to commit, and is not counted.
    reads = sum(sql.startswith("SELECT") and "FOR NO KEY" not in sql for sql in sent)
    begun = sum(sql.startswith("BEGIN") for sql in sent)
    return Cost(len(statements), len(sent), begun + max(alone - reads, 0))


def per_row(processor: BatchProcessor[Any], make: Callable[[int], None], rows: int) -> Cost:
    """Return what each further row costs, when there are more than a few."""
    few = max(processor.batch_size, 1)
    make(few)
    run(processor, few)  # the first on a connection asks for its isolation level
    make(few)
    short = cost(lambda: run(processor, few))
    make(few + rows)
    long = cost(lambda: run(processor, few + rows))
    return (long - short) / rows


def run(processor: BatchProcessor[Any], rows: int) -> None:
    assert processor().processed == rows


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


ERRANDS = Errand.objects.filter(done=False)
SPANNING = Parcel.objects.filter(sent=False).exclude(
    Exists(Depot.objects.filter(pk=OuterRef("depot"), name="closed"))
)
CLAIM = {"claim": {"claimed": True}, "claimed_at": "claimed_at"}


@pytest.mark.parametrize(
    ("processor", "make", "expected"),
    [
        # lock and ask, flip; BEGIN and COMMIT
        (transactional(), parcels, Cost(2, 4, 1)),
        # lock, ask, flip
        (transactional(pending=SPANNING), parcels, Cost(3, 5, 1)),
        # claim and flip in one
        (transactional(delivery=Delivery.AT_MOST_ONCE), parcels, Cost(1, 1, 1)),
        # claim, settle
        (outside(delivery=Delivery.AT_MOST_ONCE, **CLAIM), errands, Cost(2, 2, 2)),
        (outside(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60)), errands, Cost(2, 2, 2)),
    ],
    ids=["transactional", "spanning", "at_most_once", "claimed", "at_least_once"],
)
def test_what_a_row_costs(
    processor: BatchProcessor[Any], make: Callable[[int], None], expected: Cost
) -> None:
    assert per_row(processor, make, 20) == expected


@pytest.mark.parametrize("size", [10, 100])
def test_a_batch_costs_what_one_row_does(size: int) -> None:
    """For the handlers that do nothing in the database."""
    each = per_row(transactional(batch_size=size), parcels, 2 * size)
    assert each == Cost(2, 4, 1) / size


def test_an_empty_run_costs_one_look() -> None:
    assert cost(transactional()) == Cost(1, 1, 0)
    assert cost(transactional(pending=SPANNING)) == Cost(1, 1, 0)
    assert cost(outside(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60))) == Cost(1, 1, 0)


@contextmanager
def held(number: int) -> Iterator[None]:
    """Have another copy at work on the first rows."""
    other = Parcel.objects.using("other").order_by("pk")
    with transaction.atomic(using="other"):
        assert len(other.select_for_update(no_key=True)[:number]) == number
        yield


def test_a_row_that_another_copy_has_costs_one_statement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is met once in the pass, and looked at once more, all together, at its end."""
    monkeypatch.setattr(secrets, "randbelow", lambda number: 0)
    parcels(40)
    impatient = transactional()
    with held(30):
        long = cost(lambda: impatient(wait_for_locked=0))
    parcels(40)
    with held(10):
        short = cost(lambda: impatient(wait_for_locked=0))
    # The rows that were got cost 2, of which the shorter run has 20 more.
    each = (long.statements - short.statements + 2 * 20) / 20
    assert 1 <= each <= 1.3


def test_a_whole_window_that_another_copy_has_is_passed_at_one_statement_a_row() -> None:
    parcels(600)
    with held(600):
        spent = cost(lambda: transactional()(wait_for_locked=0))
    assert spent.statements <= 600 * 1.05


def test_the_other_alias_is_another_session() -> None:
    """As ``held()`` needs it."""
    assert connections["other"].settings_dict["NAME"] == connection.settings_dict["NAME"]
    with connection.cursor() as mine, connections["other"].cursor() as other:
        mine.execute("SELECT pg_backend_pid()")
        other.execute("SELECT pg_backend_pid()")
        assert mine.fetchone() != other.fetchone()
