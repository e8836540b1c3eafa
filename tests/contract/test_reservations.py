"""Rows that are handed out, and settled by the holder of the token."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core import signing
from django.db import OperationalError, connection, transaction
from django.db.models import F, Model, QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now

from dcl_processor import BatchProcessor, Delivery, Discard, Lease, Snooze, batch_processor
from dcl_processor.contrib.reservations import Reservation, handing_out
from dcl_processor.contrib.reservations import hold as held
from dcl_processor.exceptions import (
    InsideTransaction,
    InvalidOption,
    InvalidToken,
    ReservationLost,
    StillPending,
)
from tests.contract.support import errands as the
from tests.contract.support.marking import marking
from tests.contract.support.messages import updates
from tests.contract.support.sessions import before_statement
from tests.contract.support.temporary import at_update
from tests.models import Badge, Depot, Errand, Letter, Parcel, QuietParcel, Seat, Voucher

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


each_kind = pytest.mark.parametrize("kind", [the.at_least_once, marking, claiming])
each_lease = pytest.mark.parametrize("kind", [the.at_least_once, marking])


def lapse() -> None:
    """Let a day pass: every lease is as it would be, a whole number of durations later."""
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


def test_rows_that_have_used_up_their_attempts_are_given_up_on_and_not_counted() -> None:
    used_up = the.errands(60, attempts=3)
    fresh = Errand.objects.create()
    run = make(failed={"dead": True})
    assert [each.row for each in run.reserve()] == [fresh]
    assert Errand.objects.filter(dead=True, leased_until=None).count() == len(used_up)


@each_lease
def test_the_attempt_is_counted_at_the_hand_out_and_given_back_at_a_release(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind, retry=the.retry())
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

    def fail(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(held, "sign", fail)
        with pytest.raises(KeyboardInterrupt):
            make(kind).reserve(2)
    assert all(map(the.untouched, rows))


# --- how it ends


@each_kind
def test_a_block_settles_its_row_unless_that_was_done(kind: Any) -> None:
    one, two = the.errands(2)
    first, second = make(kind).reserve(2)
    with first:
        pass
    with second:
        second.settle("early")
    assert (the.state(one)["result"], the.state(two)["result"]) == ("None", "early")


@each_kind
@pytest.mark.parametrize("in_a_block", [True, False])
def test_a_row_ends_by_what_its_block_raises_or_by_a_method(kind: Any, in_a_block: bool) -> None:
    rows = the.errands(4)
    run = make(kind, retry=the.retry(), failed={"dead": True})
    failed, snoozed, discarded, released = (again(run, each) for each in run.reserve(4))
    if in_a_block:
        with pytest.raises(ValueError, match="no"), failed:
            raise ValueError("no")
        with snoozed:
            raise Snooze(delay=60)
        with discarded:
            raise Discard("never")
    else:
        failed.fail(ValueError("no"))
        snoozed.snooze(60)
        discarded.discard("never")
    released.release()
    said = [the.state(row) for row in rows]
    assert [each["attempts"] for each in said] == [1, 0, 1, 0]
    assert [each["dead"] for each in said] == [False, False, True, False]
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)
    left = Errand.objects.order_by("pk").values_list("next_attempt_at", "last_error")
    assert [at is None for at, _ in left] == [False, False, True, True]
    assert [error for _, error in left] == ["ValueError: no", "", "Discard: never", ""]


def test_an_error_in_a_block_whose_row_was_lost_says_so() -> None:
    [row] = the.errands(1)
    [handed] = make().reserve()
    row.delete()
    with pytest.raises(ValueError, match="no") as error, handed:
        raise ValueError("no")
    assert "because it was deleted" in error.value.__notes__[0]


def test_a_row_of_another_reservation_that_is_lost_in_a_block_fails_the_blocks_row() -> None:
    mine, other = the.errands(2)
    run = make(retry=the.retry())
    handed, gone = run.reserve(2)
    other.delete()
    with pytest.raises(ReservationLost) as error, handed:
        gone.settle()
    assert error.value.of is gone
    said = the.state(mine)
    assert (said["attempts"], said["leased_until"]) == (1, False)
    assert "ReservationLost" in Errand.objects.get(pk=mine.pk).last_error


if connection.vendor == "postgresql":

    @each_lease
    def test_the_callers_error_is_that_of_the_database_while_it_settles_nothing(
        kind: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The row is still the reservation's, and is settled when the database can."""
        [row] = the.errands(1)
        run = make(kind)
        [handed] = run.reserve()
        monkeypatch.setattr(handing_out, "PATIENCE", 0.1)
        locked = at_update("TRUE", "RAISE EXCEPTION USING ERRCODE = '55P03'")
        with locked, pytest.raises(OperationalError):
            again(run, handed).settle()
        handed.settle()
        assert the.state(row)["done"]


def test_an_end_that_the_processor_does_not_have_is_an_error() -> None:
    the.errands(3)
    one, two, _ = make(the.at_most_once).reserve(3)
    with pytest.raises(InvalidOption, match=r"expected reset=… for release\(\), got none"):
        one.release()
    with pytest.raises(InvalidOption, match="expected reset=… for a handler that raises Snooze"):
        one.snooze()
    with pytest.raises(InvalidOption, match="expected failed=… for a handler that raises Discard"):
        two.discard("never")
    with pytest.raises(InvalidOption, match=r"expected fail\(\) to get to be an exception"):
        two.fail("no")  # type: ignore[arg-type]  # as a view may


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
    for end in (lambda: one.settle("second"), one.release, one.renew, lambda: one.snooze(None)):
        assert lost(end) == "settled"
    assert lost(lambda: one.fail(ValueError())) == "settled"
    assert lost(lambda: one.expires_at if kind is not claiming else one.renew()) == "settled"
    assert the.state(row)["result"] == "first"


@each_kind
def test_what_was_put_back_or_deleted_is_lost_for_that_reason(kind: Any) -> None:
    rows = the.errands(2)
    run = make(kind)
    one, two = run.reserve(2)
    one.release()
    rows[1].delete()
    assert lost(again(run, one).settle) == "lapsed"
    assert lost(again(run, two).settle) == "gone"
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
    for end in (one.settle, one.renew, one.release, again(run, one).settle):
        assert lost(end) == "taken_over"
    lapse()
    assert lost(one.settle) == "taken_over"
    two.settle("second")
    assert lost(one.settle) == "settled"
    assert the.state(row)["result"] == "second"


@each_lease
def test_what_comes_late_is_accepted_if_no_other_took_the_row(kind: Any) -> None:
    one, two = the.errands(2)
    run = make(kind)
    first, second = run.reserve(2)
    lapse()
    assert not run.in_progress().exists()
    again(run, first).settle("late")
    again(run, second).renew()
    assert list(run.in_progress()) == [two]
    assert the.state(one)["result"] == "late"


# --- renewals


@each_lease
def test_a_token_survives_renewals(kind: Any) -> None:
    [row] = the.errands(1)
    run = make(kind, lease=Lease(60))
    [handed] = run.reserve()
    first = handed.expires_at
    assert first is not None
    for _ in range(3):
        one = again(run, handed)
        Errand.objects.update(leased_until=F("leased_until") - timedelta(seconds=60))
        one.renew()
        assert one.expires_at is not None
        left = one.expires_at - now()
        assert timedelta(seconds=55) < left <= timedelta(seconds=125)
        assert (one.expires_at - first) % timedelta(seconds=60) == timedelta(0)
    again(run, handed).settle("still mine")
    assert the.state(row)["result"] == "still mine"


def test_a_claim_has_nothing_to_renew() -> None:
    the.errands(1)
    [handed] = make(claiming).reserve()
    handed.renew()
    assert handed.expires_at is None


def is_write(sql: str) -> bool:
    """Recognise the statement that locks the row for a settlement, or writes to it at once."""
    locks = "SKIP LOCKED" in sql or updates(sql)
    return "WHERE 1 = 0" in sql or (locks and "leased_until" in sql)


def is_settled(sql: str) -> bool:
    return is_write(sql) or ("SKIP LOCKED" in sql and "claimed_at" in sql) or updates(sql)


def elsewhere(run: BatchProcessor[Any], one: Reservation[Any], method: str) -> Callable[[], Any]:
    return lambda: the.elsewhere(getattr(again(run, one), method))


def test_a_renewal_between_the_read_and_the_write_of_a_settlement_costs_nothing() -> None:
    """The agent's heartbeat runs beside its work."""
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve()
    with before_statement(is_write, elsewhere(run, handed, "renew")):
        handed.settle("12 g")
    assert (the.state(row)["done"], the.state(row)["result"]) == (True, "12 g")


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
def test_a_take_over_between_the_read_and_the_write_is_not_overwritten(method: str) -> None:
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve()
    lapse()
    taken: list[Reservation[Any]] = []

    def take() -> None:
        taken.extend(the.elsewhere(run.reserve))

    with before_statement(is_write, take):
        assert lost(getattr(handed, method)) == "taken_over"
    assert the.state(row)["leased_until"]
    taken[0].settle("theirs")
    assert the.state(row)["result"] == "theirs"


# --- tokens


def test_a_token_is_short_and_contains_nothing_of_the_row() -> None:
    the.errands(1, last_error="secret")
    [handed] = make().reserve()
    contents = signing.loads(handed.token, salt="dcl_processor.reservation:tests.handed_out")
    version, using, pk, _, duration, attempts = contents
    assert (version, using, pk, duration, attempts) == (
        *(1, "default", str(handed.row.pk)),
        *(60_000_000, 1),
    )
    assert len(handed.token) < 130


def refused(run: BatchProcessor[Any], token: Any, **options: Any) -> None:
    with (
        before_any_query(),
        pytest.raises(InvalidToken, match=r"expected a token that reserve\(\) gave out") as error,
    ):
        run.reservation(token, **options)
    assert isinstance(error.value, signing.BadSignature)


def before_any_query() -> Any:
    def refuse(*_: Any) -> None:
        raise AssertionError("a query was sent")

    return connection.execute_wrapper(refuse)


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
    other = make(claiming if kind is not claiming else marking)
    refused(other, token)


SALT = "dcl_processor.reservation:tests.handed_out"


@pytest.mark.parametrize(
    "contents",
    [
        [2, "default", "1", 5, 60, None],
        [1, "nowhere", "1", 5, 60, None],
        [1, "default", "one", 5, 60, None],
        [1, "default", "1", 5, None, None],
    ],
    ids=str,
)
def test_a_token_of_other_versions_is_refused(contents: Any) -> None:
    """Of the library, of DATABASES, of the model, and of the processor."""
    refused(make(), signing.dumps(contents, salt=SALT))


def test_a_token_is_valid_with_what_it_is_bound_to() -> None:
    [row] = the.errands(1)
    run = make()
    [handed] = run.reserve(bound_to="robot 1")
    refused(run, handed.token)
    refused(run, handed.token, bound_to="robot 2")
    refused(run, handed.token, bound_to="")
    run.reservation(handed.token, bound_to="robot 1").settle()
    assert the.state(row)["done"]
    with pytest.raises(InvalidOption, match="expected bound_to to be a string, or None, got 3"):
        run.reserve(bound_to=3)  # type: ignore[arg-type]  # an id of another type


@pytest.mark.parametrize(
    ("model", "flag", "key"),
    [
        (Letter, "sent", {"id": uuid.UUID(int=7)}),
        (Seat, "sent", {"row": 3, "number": 4}),
        (Voucher, "sent", {"code": "a%'\"ü"}),
        (Badge, "printed", {}),
    ],
    ids=["uuid", "composite", "text", "another row's"],
)
def test_keys_of_every_kind_come_back(model: type[Any], flag: str, key: dict[str, Any]) -> None:
    if model is Badge:
        key = {"parcel": Parcel.objects.create()}
    row: Model = model.objects.create(**key)
    pending: QuerySet[Any] = model.objects.filter(**{flag: False})
    run = batch_processor(
        pending=pending, done={flag: True}, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60)
    )(never)
    [handed] = run.reserve()
    again(run, handed).settle()
    row.refresh_from_db()
    assert getattr(row, flag)


# --- where it is refused


def test_inside_a_transaction_nothing_is_handed_out_or_settled() -> None:
    the.errands(2)
    run = make()
    [handed] = run.reserve()
    for act in (run.reserve, handed.settle, handed.renew, handed.release):
        with pytest.raises(InsideTransaction), transaction.atomic():
            act()


# --- the row of a reservation that was made from a token


@pytest.mark.parametrize("is_claim", [False, True])
def test_it_has_the_class_the_related_rows_and_the_deferred_columns(is_claim: bool) -> None:
    Parcel.objects.create(depot=Depot.objects.create(name="Hamburg"))

    def pending() -> QuerySet[Any]:
        rows = QuietParcel.objects.filter(note="", sent=False).select_related("depot").defer("code")
        return rows.annotate(place=F("depot__name"))

    options: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
    if is_claim:
        claim = {"claim": {"note": "out"}, "claimed_at": "sent_at", "reset": {"note": ""}}
        options = {"delivery": Delivery.AT_MOST_ONCE, **claim}
    run: BatchProcessor[Any] = batch_processor(pending=pending, done={"sent": True}, **options)(
        never
    )
    [handed] = run.reserve()
    one = again(run, handed)
    with CaptureQueriesContext(connection) as queries:
        row = one.row
        assert row.depot.name == "Hamburg"
    assert len(queries) == 1
    assert hasattr(handed.row, "place")
    assert not hasattr(row, "place")  # without the conditions of pending it may be another one
    assert [type(each.row) for each in (handed, one)] == [QuietParcel] * 2
    assert row.get_deferred_fields() == handed.row.get_deferred_fields()
    assert row.note == handed.row.note
    one.settle()
    assert Parcel.objects.get().sent
