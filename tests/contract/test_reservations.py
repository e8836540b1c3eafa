"""Rows that are handed out, and settled by the holder of the token."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core import signing
from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.utils.timezone import now

from dcl_processor import BatchProcessor, Discard, Snooze
from dcl_processor.contrib import reservations
from dcl_processor.contrib.reservations import Reservation
from dcl_processor.exceptions import (
    InsideTransaction,
    InvalidOption,
    InvalidToken,
    ReservationLost,
    StillPending,
    Unsupported,
)
from tests.contract.support import errands as the
from tests.contract.support.marking import marking
from tests.contract.support.messages import updates
from tests.contract.support.sessions import before_statement
from tests.contract.support.temporary import at_update
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DAY = timedelta(days=1)


def with_result(row: Errand, result: Any) -> dict[str, Any]:
    return {"done": True, "claimed": False, "result": str(result)}


def claiming(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    return the.at_most_once(handler, **{"reset": {"claimed": False}, **options})


def never(row: Errand) -> None:
    raise AssertionError("the handler is elsewhere")


def make(kind: Callable[..., Any] = marking, **options: Any) -> BatchProcessor[Errand]:
    named = {"name": "tests.handed_out", "done": with_result, **options}
    run: BatchProcessor[Errand] = kind(never, **named)
    return run


each_kind = pytest.mark.parametrize("kind", [marking, claiming])


def lapse() -> None:
    """Let a day pass: every lease has lapsed."""
    Errand.objects.filter(leased_until__isnull=False).update(leased_until=F("leased_until") - DAY)


def again(run: BatchProcessor[Any], one: Reservation[Any]) -> Reservation[Any]:
    """Return the reservation that another process makes of the token."""
    return run.reservation(one.token)


def lost(act: Callable[[], Any]) -> str:
    with pytest.raises(ReservationLost) as error:
        act()
    return error.value.reason


# --- handing out


@each_kind
def test_rows_are_marked_and_handed_out_up_to_the_limit(kind: Any) -> None:
    rows = the.errands(3)
    run = make(kind)
    one, two = run.reserve(2)
    assert [one.row.pk, two.row.pk] == [row.pk for row in rows[:2]]
    assert set(run.in_progress()) == {*rows[:2]}
    assert not the.state(rows[0])["done"]
    assert [each.row for each in run.reserve(5)] == rows[2:]
    assert run.reserve() == []


@each_kind
def test_a_row_is_settled_from_its_token_with_the_result(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind)
    [handed] = run.reserve()
    the.elsewhere(lambda: again(run, handed).settle("12 g"))
    said = the.state(row)
    assert (said["done"], said["result"]) == (True, "12 g")
    assert (said["claimed_at"], said["leased_until"]) == (False, False)
    assert not run.in_progress().exists()


def test_the_attempt_is_counted_at_the_hand_out_and_given_back_at_a_release() -> None:
    [row] = the.errands(1)
    run = make()
    for _ in range(2):
        [handed] = run.reserve()
        assert the.state(row)["attempts"] == 1
        again(run, handed).release()
        assert the.untouched(row)


@each_kind
def test_an_error_of_the_hand_out_puts_the_rows_back(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = the.errands(2)

    def fail(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(signing, "dumps", fail)
        with pytest.raises(KeyboardInterrupt):
            make(kind).reserve(2)
    assert all(map(the.untouched, rows))


# --- how it ends


@each_kind
def test_a_row_ends_by_the_exception_that_it_is_settled_with(kind: Any) -> None:
    rows = the.errands(4)
    run = make(kind, retry=the.retry(), failed={"dead": True})
    failed, snoozed, discarded, released = (again(run, each) for each in run.reserve(4))
    failed.settle(ValueError("no"))
    snoozed.settle(Snooze(delay=60))
    discarded.settle(Discard("never"))
    released.release()
    said = [the.state(row) for row in rows]
    assert [each["attempts"] for each in said] == [1, 0, 1, 0]
    assert [each["dead"] for each in said] == [False, False, True, False]
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)
    left = Errand.objects.order_by("pk").values_list("next_attempt_at", "last_error")
    assert [at is None for at, _ in left] == [False, False, True, True]
    assert [error for _, error in left] == ["ValueError: no", "", "Discard: never", ""]


if connection.vendor == "postgresql":

    def test_the_callers_error_is_that_of_the_database_while_it_settles_nothing(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The row is still the reservation's, and is settled when the database can."""
        [row] = the.errands(1)
        run = make()
        [handed] = run.reserve()
        monkeypatch.setattr(reservations, "PATIENCE", 0.1)
        locked = at_update("TRUE", "RAISE EXCEPTION USING ERRCODE = '55P03'")
        with locked, pytest.raises(OperationalError):
            again(run, handed).settle()
        handed.settle()
        assert the.state(row)["done"]


def test_an_end_that_the_processor_does_not_have_is_an_error() -> None:
    the.errands(1)
    [handed] = make(claiming).reserve()
    with pytest.raises(InvalidOption, match="expected failed=… for a handler that raises Discard"):
        handed.settle(Discard("never"))


@each_kind
def test_a_flip_that_leaves_its_row_pending_is_the_rows_failure(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind, done=lambda row, result: {"done": result, "claimed": False})
    [handed] = run.reserve()
    with pytest.raises(StillPending):
        handed.settle(False)
    assert not the.state(row)["done"]


# --- what was lost


@each_kind
def test_what_was_settled_is_not_settled_again(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind)
    [handed] = run.reserve()
    again(run, handed).settle("first")
    one = again(run, handed)
    assert lost(lambda: one.settle("second")) == "settled"
    assert lost(lambda: one.settle(ValueError())) == lost(one.release) == "settled"
    assert the.state(row)["result"] == "first"


@each_kind
def test_what_was_put_back_or_deleted_is_lost_for_that_reason(kind: Any) -> None:
    rows = the.errands(2)
    run = make(kind)
    one, two = run.reserve(2)
    one.release()
    rows[1].delete()
    assert lost(again(run, one).settle) == "lapsed"
    assert lost(two.settle) == lost(lambda: again(run, two)) == "gone"
    assert the.untouched(rows[0])


@each_kind
def test_what_another_has_taken_over_is_lost(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind)
    [one] = run.reserve()
    if kind is claiming:
        assert run.requeue(Errand.objects.all(), force=True) == 1
    else:
        lapse()
    [two] = run.reserve()
    for end in (one.settle, one.release, again(run, one).settle):
        assert lost(end) == "taken_over"
    if kind is marking:
        assert lost(one.renew) == lost(lambda: one.expires_at) == "taken_over"
    two.settle("second")
    assert lost(one.settle) == "settled"
    assert the.state(row)["result"] == "second"


def test_what_comes_late_is_accepted_if_no_other_took_the_row() -> None:
    one, two = the.errands(2)
    run = make()
    first, second = run.reserve(2)
    lapse()
    assert not run.in_progress().exists()
    again(run, first).settle("late")
    again(run, second).renew()
    assert list(run.in_progress()) == [two]
    assert the.state(one)["result"] == "late"


# --- renewals


def test_a_token_survives_renewals() -> None:
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve()
    for _ in range(3):
        Errand.objects.update(leased_until=F("leased_until") - timedelta(seconds=50))
        one = again(run, handed)
        one.renew()
        assert one.expires_at is not None
        assert timedelta(seconds=55) < one.expires_at - now() <= timedelta(seconds=65)
    again(run, handed).settle("still mine")
    assert the.state(row)["result"] == "still mine"


def is_settled(sql: str) -> bool:
    """Recognise the statement that locks the row for a settlement, or writes to it at once."""
    return "WHERE 1 = 0" in sql or ("SKIP LOCKED" in sql and "claimed_at" in sql) or updates(sql)


@each_kind
def test_of_two_settlements_that_meet_one_is_written(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind)
    [handed] = run.reserve()

    def settle() -> None:
        the.elsewhere(lambda: again(run, handed).settle("first"))

    with before_statement(is_settled, settle):
        assert lost(lambda: handed.settle("second")) == "settled"
    assert the.state(row)["result"] == "first"


@pytest.mark.parametrize("method", ["settle", "renew", "release"])
def test_a_take_over_just_before_the_write_is_not_overwritten(method: str) -> None:
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve()
    lapse()
    taken: list[Reservation[Any]] = []
    with before_statement(is_settled, lambda: taken.extend(the.elsewhere(run.reserve))):
        assert lost(getattr(handed, method)) == "taken_over"
    assert the.state(row)["leased_until"]
    taken[0].settle("theirs")
    assert the.state(row)["result"] == "theirs"


# --- tokens


def refused(run: BatchProcessor[Any], token: Any, **options: Any) -> None:
    def send(*_: Any) -> None:
        raise AssertionError("a query was sent")

    with (
        connection.execute_wrapper(send),
        pytest.raises(InvalidToken, match=r"expected a token that reserve\(\) gave out") as error,
    ):
        run.reservation(token, **options)
    assert isinstance(error.value, signing.BadSignature)


@each_kind
def test_a_token_that_was_changed_or_is_another_processors_is_refused(kind: Any) -> None:
    the.errands(1)
    run = make(kind)
    [handed] = run.reserve()
    token = handed.token
    refused(run, token[:-1] + ("a" if token[-1] != "a" else "b"))
    refused(run, "x" + token)
    refused(run, "")
    refused(run, None)
    refused(make(kind, name="tests.another"), token)


def test_a_token_is_valid_with_what_it_is_bound_to() -> None:
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve(bound_to="robot 1")
    refused(run, handed.token)
    refused(run, handed.token, bound_to="robot 2")
    refused(run, handed.token, bound_to="")
    run.reservation(handed.token, bound_to="robot 1").settle()
    assert the.state(row)["done"]


# --- where it is refused


def test_inside_a_transaction_nothing_is_handed_out_or_settled() -> None:
    the.errands(2)
    run = make()
    [handed] = run.reserve()
    for act in (run.reserve, handed.settle, handed.renew, handed.release):
        with pytest.raises(InsideTransaction), transaction.atomic():
            act()


@pytest.mark.parametrize("option", ["claim", "claimed_at", "reset"])
def test_a_processor_whose_rows_do_not_show_who_has_them_is_refused(option: str) -> None:
    made: dict[str, Callable[..., BatchProcessor[Errand]]] = {
        "claim": the.at_least_once,
        "claimed_at": lambda handle: claiming(handle, claimed_at=None),
        "reset": the.at_most_once,
    }
    run = made[option](never)
    for act in (run.reserve, lambda: run.reservation("")):
        with pytest.raises(Unsupported, match=r"expected a processor with claim=…, claimed_at=…"):
            act()
