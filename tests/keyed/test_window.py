"""The lock-free read of keys in one statement, and the turns that they take."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q

from dcl_processor.keys import window
from dcl_processor.keys.turns import Turns
from dcl_processor.keys.window import Found, Reads
from tests.keyed.sessions import FREE, LEASE, WAITED, own_table
from tests.models import Call, Depot

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL probes"),
]

NEVER = Q(pk__lt=0)


def reads(*, in_order: bool = False, leases: bool = False) -> Reads:
    return Reads("depot_id", in_order, LEASE if leases else None, "default")


def fill(*keys: int | None) -> list[int]:
    """Make a row of each key, with places as they come; return their primary keys."""
    Depot.objects.bulk_create(Depot(pk=key, name="") for key in {*keys} - {None})
    rows = [Call(depot_id=key, place=place) for place, key in enumerate(keys)]
    return [row.pk for row in Call.objects.bulk_create(rows)]


def pks(found: Sequence[Found]) -> list[Any]:
    return [each.pk for each in found]


def test_a_window_has_the_first_rows_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "ROWS", 4)
    one, two, three, four, _, _ = fill(1, 1, 2, 2, 1, 2)
    found, after = reads().read(own_table(), None, None, [])
    assert pks(found) == [one, two, three, four]
    assert [each.key for each in found] == [1, 1, 2, 2]
    assert after is None


def test_windows_go_on_behind_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "KEYS", 2)
    one, two, three = fill(1, 2, 3)
    found, after = reads().read(own_table(), None, None, [])
    assert (pks(found), after) == ([one, two], 2)
    found, after = reads().read(own_table(), None, after, [])
    assert (pks(found), after) == ([three], None)


def test_the_order_is_that_of_the_queryset_and_then_of_the_key() -> None:
    one, two, three = fill(1, 1, 1)
    Call.objects.filter(pk=one).update(place=9)
    Call.objects.filter(pk=two).update(place=5)
    Call.objects.filter(pk=three).update(place=5)
    found, _ = reads().read(own_table(), None, None, [])
    assert pks(found) == [two, three, one]


def test_rows_without_a_key_come_with_the_first_window_alone() -> None:
    without, one = fill(None, 1)
    found, _ = reads().read(own_table(), None, None, [])
    assert pks(found) == [without, one]
    found, _ = reads().read(own_table(), None, 0, [])
    assert pks(found) == [one]


def test_a_row_to_be_taken_over_is_read_first_however_late_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "ROWS", 1)
    one, _, three = fill(1, 1, 1)
    Call.objects.filter(pk=three).update(leased_until="2000-01-01T00:00Z")
    found, _ = reads(leases=True).read(own_table(), WAITED & FREE, None, [])
    assert pks(found) == [three, one]


def test_in_order_a_row_that_is_not_due_is_shown_to_hold_those_behind_it() -> None:
    one, two = fill(1, 1)
    Call.objects.filter(pk=one).update(next_attempt_at="2999-01-01T00:00Z")
    found, _ = reads(in_order=True).read(own_table(), WAITED, None, [])
    assert [(each.pk, each.is_due) for each in found] == [(one, False), (two, True)]
    found, _ = reads().read(own_table(), WAITED, None, [])
    assert [(each.pk, each.is_due) for each in found] == [(two, True)]


def test_a_key_without_a_due_row_is_not_read_in_order() -> None:
    fill(1, 1)
    assert reads(in_order=True).read(own_table(), NEVER, None, []) == ([], None)


def test_rows_that_were_tried_are_not_read_again() -> None:
    one, two = fill(1, 1)
    found, _ = reads().read(own_table(), None, None, [one])
    assert pks(found) == [two]


# --- turns


def turns(*, most: int | None = None, in_order: bool = False) -> Turns:
    reader = reads(in_order=in_order)
    return Turns(
        lambda after, tried: reader.read(own_table(), WAITED, after, tried), most, in_order
    )


def handle(taking: Turns, rows: Mapping[Any, Any]) -> None:
    Call.objects.filter(pk__in=[*rows]).update(status="done")
    for pk, key in rows.items():
        taking.end(pk, key, done=True)


def test_a_small_key_does_not_wait_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with 2,000 rows and 20 with two each: the small ones start within two windows."""
    monkeypatch.setattr(window, "ROWS", 210)
    fill(*[1] * 2_000, *[key for key in range(2, 22) for _ in range(2)])
    taking, order = turns(), list[int]()
    while rows := taking.take(10):
        order += rows.values()
        handle(taking, rows)
    assert len(order) == 2_040
    last = max(place for place, key in enumerate(order) if key > 1)
    assert last < 210


def test_a_run_ends_when_the_table_is_empty_however_many_keys_there_are() -> None:
    fill(*range(1, 501), *range(1, 501))
    taking, handled = turns(most=1, in_order=True), Counter[int]()
    while rows := taking.take(7):
        handled.update(rows.values())
        handle(taking, rows)
    assert handled == Counter(dict.fromkeys(range(1, 501), 2))
    assert not taking.has_busy


def test_no_more_rows_of_a_key_are_given_than_may_be_in_flight() -> None:
    fill(*[1] * 5, *[2] * 5)
    taking = turns(most=2)
    rows = taking.take(10)
    assert Counter(rows.values()) == {1: 2, 2: 2}
    assert taking.take(10) == {}
    first = next(iter(rows))
    handle(taking, {first: rows[first]})
    assert [*taking.take(10).values()] == [rows[first]]


@pytest.mark.parametrize("in_order", [True, False])
def test_behind_a_head_that_failed_rows_go_on_unless_their_order_counts(in_order: bool) -> None:
    _, two = fill(1, 1)
    taking = turns(most=1, in_order=in_order)
    (head,) = taking.take(1)
    taking.end(head, 1, done=False)
    assert [*taking.take(1)] == ([] if in_order else [two])


def test_rows_that_another_worker_has_are_left_to_the_next_cycle() -> None:
    (one,) = fill(1)
    taking = turns(most=1)
    (row,) = taking.take(1)
    taking.miss(row, 1, is_alone=False)
    assert not taking.take(1)
    taking.resume()
    assert [*taking.take(1)] == [one]


def test_workers_begin_a_long_key_at_different_places() -> None:
    fill(*[1] * 200)
    random.seed(0)
    first = {next(iter(turns().take(1))) for _ in range(20)}
    assert len(first) > 10
    in_order = {next(iter(turns(in_order=True).take(1))) for _ in range(5)}
    assert len(in_order) == 1
