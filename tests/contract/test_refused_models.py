"""Models whose rows one flip cannot settle are refused by name, and no handler's work is lost."""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor import Delivery, Lease, Retry, batch_processor
from dcl_processor.checks import check_found
from dcl_processor.exceptions import InvalidDone, InvalidOption
from dcl_processor.operator.registry import Found
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Seat, Truck, Vehicle

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# --- columns of a parent's table (multi-table inheritance)


def trucks(model: Any = Truck, **options: Any) -> Any:
    pending = model.objects.filter(weighed=False, load=0)
    return batch_processor(pending=pending, **{"done": {"weighed": True}, **options})(the.ignore)


CLAIMED = {"delivery": Delivery.AT_MOST_ONCE, "claim": {"load": 1}}
COLUMNS: dict[str, Any] = {"attempts": "load", "next_attempt_at": None, "last_error": None}

#: Options that name a column of the parent's table, and the check that finds them.
OF_THE_PARENT: dict[str, tuple[dict[str, Any], str]] = {
    "done": ({"done": {"weighed": True, "inspected": True}}, "E002"),
    "failed": ({"failed": {"plate": "failed"}}, "E002"),
    "reset": ({**CLAIMED, "reset": {"load": 0, "plate": ""}}, "E002"),
    "claim": ({**CLAIMED, "claim": {"load": 1, "plate": "claimed"}}, "E002"),
    "claimed_at": ({**CLAIMED, "claimed_at": "leased_until"}, "E009"),
    "the Lease's field": ({"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}, "E009"),
    "Retry's last_error": ({"retry": Retry(None, **{**COLUMNS, "last_error": "plate"})}, "E009"),
}


@pytest.mark.parametrize("option", OF_THE_PARENT)
def test_a_column_of_a_parents_table_is_refused(option: str) -> None:
    truck = Truck.objects.create()
    options, check = OF_THE_PARENT[option]
    run = trucks(**options)
    words = rf"expected {option}.* of tests.Vehicle; write the processor over tests.Vehicle\.$"
    [message] = [each for each in check_found([Found(run, "tests.run")]) if each.is_serious()]
    assert message.id == f"dcl_processor.{check}"
    with pytest.raises((InvalidDone, InvalidOption), match=words):
        run()
    assert Truck.objects.filter(pk=truck.pk, weighed=False, inspected=False, load=0).exists()


def test_a_function_is_refused_for_the_row_that_it_gives_such_a_column() -> None:
    Truck.objects.create()
    report = trucks(done=lambda row: {"weighed": True, "inspected": True})()
    assert_run(report, failed=1)
    with pytest.raises(InvalidDone, match=r"write the processor over tests.Vehicle\.$"):
        raise report.failures[0].error
    assert Vehicle.objects.filter(inspected=False, truck__weighed=False).count() == 1


# --- what keeps working: the model's own columns, and a composite key


@pytest.mark.parametrize("size", [1, 10])
def test_a_child_is_handled_whose_own_columns_are_flipped(size: int) -> None:
    """Its condition may be on a column of the parent's table."""
    made = [Truck.objects.create(inspected=number == 2) for number in range(4)]
    calls: list[Any] = []

    def handle(truck: Truck) -> None:
        calls.append(truck.pk)
        if truck.pk == made[3].pk:
            raise ValueError("too heavy")

    pending = Truck.objects.filter(weighed=False, load=0, inspected=False)
    retry = Retry(None, **COLUMNS)
    run = batch_processor(pending=pending, done={"weighed": True}, retry=retry, batch_size=size)
    assert_run(run(handle)(), processed=2, failed=1, to_retry=1)
    assert sorted(calls) == [made[0].pk, made[1].pk, made[3].pk]
    said = Truck.objects.order_by("pk").values_list("weighed", "load", "inspected")
    assert [*said] == [(True, 0, False), (True, 0, False), (False, 0, True), (False, 1, False)]


@pytest.mark.parametrize(
    "options",
    [{}, {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}],
    ids=["transactional", "at_least_once"],
)
@pytest.mark.parametrize("size", [1, 10])
def test_rows_of_a_composite_key_are_handled_once(options: dict[str, Any], size: int) -> None:
    Seat.objects.bulk_create(Seat(row=row, number=number) for row in (1, 2) for number in (1, 2))
    Seat.objects.filter(row=2, number=1).update(sent=True)
    calls: list[Any] = []
    pending = Seat.objects.filter(sent=False)
    run = batch_processor(pending=pending, done={"sent": True}, batch_size=size, **options)
    assert_run(run(lambda seat: calls.append(seat.pk))(), processed=3)
    assert sorted(calls) == [(1, 1), (1, 2), (2, 2)]
    assert Seat.objects.filter(sent=True, leased_until=None).count() == 4
