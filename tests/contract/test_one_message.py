"""One message for each row: its flip and COMMIT are sent with the BEGIN and claim of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from django.db import connection, transaction

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.signals import row_finished
from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL, messages
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.contract.support.temporary import at_update, temporary
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.skipif(not SENDS_SEVERAL, reason="the driver sends one statement at a time"),
]

#: What drops a row in words that are not those of other triggers, so that flips still wait.
DROP = "RETURN CASE WHEN false THEN NEW END"

OWN = Errand.objects.filter(done=False)
SPANNING = OWN.filter(pk__in=OWN.values("pk"))


def processor(handler: Callable[[Errand], Any], **options: Any) -> BatchProcessor[Errand]:
    return batch_processor(**{"pending": OWN, "done": {"done": True}, **options})(handler)


def per_row(
    handler: Callable[[Errand], Any], *, make: the.Make = the.transactional, **options: Any
) -> float:
    """Return how many messages one more row costs."""
    counts: list[int] = []
    size: int = options.get("batch_size", 1)
    for number in (10 * size, 30 * size):
        Errand.objects.all().delete()
        the.errands(number)
        with messages() as sent:
            assert make(handler, **{"pending": OWN, **options})().processed == number
        assert not OWN.exists()
        counts.append(len(sent))
    return (counts[1] - counts[0]) / (20 * size)


@pytest.mark.parametrize("pending", [OWN, SPANNING], ids=["own table", "spanning"])
def test_a_row_is_one_message(pending: Any) -> None:
    assert per_row(lambda row: None, pending=pending) == 1


def test_a_batch_is_one_message() -> None:
    assert per_row(lambda row: None, batch_size=10) == 1 / 10


def test_a_batch_whose_rows_have_values_of_their_own_is_one_message() -> None:
    places = count()
    done = {"done": True, "result": lambda: f"token {next(places)}"}
    assert per_row(lambda row: None, batch_size=10, done=done) == 1 / 10
    assert len(set(Errand.objects.values_list("result", flat=True))) == 300


@the.each_delivery
def test_a_bulk_call_is_four_messages(make: the.Make) -> None:
    """The claim, and BEGIN, one UPDATE and COMMIT for the settlement of all its rows."""
    options: dict[str, Any] = {"process_batch": lambda rows: None, "pending": the.PENDING}
    assert per_row(the.ignore, make=make, batch_size=10, **options) == 4 / 10


COMMITTED_CLAIMS = pytest.mark.parametrize(
    ("make", "options"),
    [
        (the.at_most_once, {}),
        (the.at_most_once, {"reset": {"claimed": False}, "retry": the.retry()}),
        (the.at_least_once, {}),
        (the.at_least_once, {"retry": the.retry()}),
    ],
    ids=["AT_MOST_ONCE", "AT_MOST_ONCE, retry", "AT_LEAST_ONCE", "AT_LEAST_ONCE, retry"],
)


@COMMITTED_CLAIMS
def test_a_row_is_one_message_also_when_its_claim_is_committed(
    make: the.Make, options: Any
) -> None:
    assert per_row(the.ignore, make=make, pending=the.PENDING, **options) == 1


def test_a_handlers_own_statements_are_messages_of_their_own() -> None:
    assert per_row(lambda row: Errand.objects.filter(pk=row.pk).update(place=1)) == 2


def test_a_callback_runs_before_the_next_row_is_claimed() -> None:
    rows = the.errands(4)
    seen: list[Any] = []

    def handle(row: Errand) -> None:
        seen.append(row.pk)

        def callback() -> None:
            done = the.elsewhere(lambda: Errand.objects.get(pk=row.pk).done)
            seen.append((row.pk, done, connection.in_atomic_block))

        transaction.on_commit(callback)

    assert processor(handle)().processed == 4
    assert seen == [each for row in rows for each in (row.pk, (row.pk, True, False))]


@pytest.fixture
def receiver() -> Iterator[list[tuple[Any, str, bool]]]:
    told: list[tuple[Any, str, bool]] = []

    def receive(*, pk: Any, outcome: str, **_: Any) -> None:
        told.append((pk, outcome, connection.in_atomic_block))
        with transaction.atomic():
            Errand.objects.create(done=True, place=-1)
            transaction.set_rollback(True)

    row_finished.connect(receive)
    yield told
    row_finished.disconnect(receive)


def test_a_receiver_writes_into_no_rows_transaction(receiver: list[Any]) -> None:
    rows = the.errands(4)
    assert processor(lambda row: None)().processed == 4
    assert receiver == [(row.pk, "processed", False) for row in rows]


def test_a_flip_that_is_dropped_costs_its_own_row_alone() -> None:
    rows = the.errands(5)
    with at_update("NEW.place = 2 AND NEW.done", DROP):
        report = processor(lambda row: None)()
    assert (report.processed, report.failed, report.stopped) == (4, 1, "drained")
    assert report.failures[0].pk == rows[2].pk
    assert "expected the update to write row" in str(report.failures[0].error)
    assert "look for a trigger" in str(report.failures[0].error)
    assert list(OWN.values_list("place", flat=True)) == [2]


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("when", ["before the flip", "after the commit"])
def test_a_session_that_is_cut_in_the_message_is_looked_up(when: str, repeats: bool) -> None:
    """The server ends the session before or after the COMMIT in the message."""
    rows = the.errands(5)
    handled: list[int] = []
    claim = when == "after the commit"

    def handle(row: Errand) -> None:
        handled.append(row.place)

    with session_killer(rows[3] if claim else rows[2], at_flip=not claim):
        pending = OWN.extra(where=["tests_kill(id) = id"]) if claim else OWN
        report = processor(handle, pending=pending, repeats=repeats)()
    assert report.stopped == "drained"
    if claim:
        assert (report.processed, report.failed) == (5, 0)
        assert sorted(handled) == [0, 1, 2, 3, 4]
    else:
        assert (report.processed, report.failed) == (4, 1)
        assert report.failures[0].pk == rows[2].pk


def test_a_handler_that_has_committed_by_itself_is_not_taken_for_its_flip() -> None:
    """Its transaction is committed, and the session ends before the flip."""
    rows = the.errands(4)

    def handle(row: Errand) -> None:
        if row.place == 2:
            with connection.cursor() as cursor:
                cursor.execute("COMMIT; BEGIN")
            end_session()

    report = processor(handle)()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert list(OWN.values_list("place", flat=True)) == [2]


def session_killer(row: Errand, *, at_flip: bool) -> Any:
    """End the session in the row's flip, or once in its claim."""
    if at_flip:
        kill = "PERFORM pg_terminate_backend(pg_backend_pid())"
        return at_update(f"NEW.id = {row.pk} AND NEW.done", kill)
    return temporary(
        "CREATE SEQUENCE tests_once; "
        "CREATE FUNCTION tests_kill(id bigint) RETURNS bigint LANGUAGE plpgsql AS "
        f"'BEGIN IF id = {row.pk} AND pg_current_xact_id_if_assigned() IS NOT NULL "
        "AND nextval(''tests_once'') = 1 THEN "
        "PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN id; END'",
        "DROP FUNCTION tests_kill; DROP SEQUENCE tests_once",
    )
