"""Flips that the database refuses: before the first handler, or after two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, connection

from dcl_processor.exceptions import InvalidDone
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

each_size = pytest.mark.parametrize("size", [1, 10])

LONG = "x" * 51
#: A value that another row has in a unique column.
TAKEN: dict[str, Any] = {"done": True, "code": "taken"}


def errands(number: int) -> list[Errand]:
    """Make pending errands, and one that is done and has the code."""
    rows = the.errands(number)
    Errand.objects.create(place=-1, **TAKEN)
    return rows


def charging(calls: list[int]) -> Callable[[Errand], str]:
    def charge(row: Errand) -> str:
        calls.append(row.place)
        return f"ch_{row.place}"

    return charge


# --- a constant, of which one row shows what holds for all


if connection.vendor != "sqlite":  # which has no lengths, nor rights

    @the.all_deliveries
    @each_size
    @pytest.mark.parametrize("done", [{"done": True, "result": LONG}, {"place": 2**40}])
    def test_a_constant_that_no_row_can_hold_ends_the_run_without_a_call(
        make: the.Make, size: int, done: dict[str, Any]
    ) -> None:
        rows = the.errands(30)
        calls: list[int] = []
        run = make(charging(calls), done=done, batch_size=size, **the.retried(make))
        for _ in range(2):
            with pytest.raises(InvalidDone, match="no handler was called") as refused:
                run()
        with pytest.raises(InvalidDone) as said:
            run.dry_run()
        assert str(said.value) == str(refused.value)
        assert calls == []
        assert all(the.untouched(row) for row in rows)


if connection.vendor == "postgresql":

    def test_a_missing_right_is_named_before_the_first_handler() -> None:
        the.errands(3)
        calls: list[int] = []
        run = the.transactional(charging(calls), done={"done": True, "result": "sent"})
        columns = [f.attname for f in Errand._meta.concrete_fields if f.attname != "result"]
        rights = f"SELECT, UPDATE ({', '.join(columns)})"
        without_right = temporary(
            f"CREATE ROLE tests_clerk; GRANT {rights} ON tests_errand TO tests_clerk; "
            "SET ROLE tests_clerk",
            "RESET ROLE; DROP OWNED BY tests_clerk; DROP ROLE tests_clerk",
        )
        with without_right, pytest.raises(InvalidDone, match="permission denied"):
            run()
        assert calls == []


# --- what only the handler's end shows


FLIPS: dict[str, Any] = {
    "constant": TAKEN,
    "of the row": lambda _: dict(TAKEN),
    "of the result": lambda _, __: dict(TAKEN),
}
each_flip = pytest.mark.parametrize("done", FLIPS.values(), ids=FLIPS)


@the.all_deliveries
@each_size
@each_flip
def test_a_flip_that_is_refused_for_all_rows_costs_two_calls(
    make: the.Make, size: int, done: Any, caplog: pytest.LogCaptureFixture
) -> None:
    errands(60)
    calls: list[int] = []
    run = make(charging(calls), done=done, batch_size=size)
    report = run()
    assert_run(report, failed=2, stopped="failures")
    assert all(isinstance(each.error, IntegrityError) for each in report.failures)
    assert len(calls) == len(set(calls)) == 2
    assert calls[0] == 0  # the second row is one from anywhere
    # What was bought is known, although no row has it.
    for place in calls:
        assert f"ch_{place}" in caplog.text
    assert Errand.objects.filter(done=True).count() == 1


@the.all_deliveries
@each_size
@pytest.mark.parametrize("of_result", [False, True])
def test_one_refused_row_stops_nothing(make: the.Make, size: int, *, of_result: bool) -> None:
    errands(20)
    calls: list[int] = []

    def flip(row: Errand) -> dict[str, Any]:
        return {"done": True, "code": f"{row.place}" if row.place else "taken"}

    def flip_with(row: Errand, result: str) -> dict[str, Any]:
        return {**flip(row), "result": result}

    run = make(charging(calls), done=flip_with if of_result else flip, batch_size=size)
    assert_run(run(), processed=19, failed=1)
    assert sorted(calls) == [*range(20)]
    assert the.places(done=True) == [-1, *range(1, 20)]


@the.all_deliveries
def test_rows_before_it_do_not_hide_that_every_flip_is_refused(make: the.Make) -> None:
    errands(40)
    calls: list[int] = []

    def flip(row: Errand) -> dict[str, Any]:
        return {"done": True, "code": f"{row.place}" if row.place < 5 else "taken"}

    report = make(charging(calls), done=flip)()
    assert_run(report, processed=5, failed=2, stopped="failures")
    assert len(calls) == 7
    assert the.places(done=True) == [-1, *range(5)]


# --- the dry run
