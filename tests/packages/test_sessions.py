"""What a project sets for its sessions, or puts around its cursors."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, connections

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the driver of "other" prepare each statement."""
    other = connections["other"]
    for name, value in {"server_side_binding": True, "prepare_threshold": 0}.items():
        monkeypatch.setitem(other.settings_dict["OPTIONS"], name, value)
    other.close()
    yield other
    other.close()


@the.all_deliveries
def test_values_may_be_bound_by_the_server(make: the.Make, bound: Any) -> None:
    the.errands(7)
    assert_run(make(the.ignore, batch_size=3).run(using="other"), processed=7)


@the.all_deliveries
def test_a_column_that_gets_another_type_under_prepared_statements_costs_no_row(
    make: the.Make, bound: Any
) -> None:
    """The server refuses a claim whose plan is out of date; a later run takes its row."""
    change, calls = "ALTER TABLE tests_errand ALTER COLUMN result TYPE", list[int]()

    def work(errand: Errand) -> None:
        calls.append(errand.place)
        # Its lock would keep the change waiting.
        if len(calls) == 2 and not bound.in_atomic_block:
            apply("text")

    def apply(kind: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"{change} {kind}")

    the.errands(3)
    with temporary("", f"{change} varchar(50)"):
        make(work).run(using="other")
        apply("text")
        make(work).run(using="other")
        assert sorted(calls) == the.places(done=True) == [0, 1, 2]
