"""A trigger that keeps what a claim was to overwrite, in some rows: these are handled in no run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection

from dcl_processor.exceptions import ProcessorError
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CREATE = {
    "postgresql": (
        """CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF OLD.place % 3 = 2 THEN NEW.{0} = OLD.{0}; END IF; RETURN NEW; END $$""",
        """CREATE TRIGGER tests_keep BEFORE UPDATE ON tests_errand FOR EACH ROW
        EXECUTE FUNCTION tests_keep()""",
    ),
    "mysql": (
        """CREATE TRIGGER tests_keep BEFORE UPDATE ON tests_errand FOR EACH ROW
        SET NEW.{0} = IF(OLD.place % 3 = 2, OLD.{0}, NEW.{0})""",
    ),
    "sqlite": (
        """CREATE TRIGGER tests_keep AFTER UPDATE ON tests_errand FOR EACH ROW
        WHEN OLD.place % 3 = 2 BEGIN
        UPDATE tests_errand SET {0} = OLD.{0} WHERE id = OLD.id; END""",
    ),
}
DROP = {
    "postgresql": ("DROP TRIGGER tests_keep ON tests_errand", "DROP FUNCTION tests_keep"),
    "mysql": ("DROP TRIGGER tests_keep",),
    "sqlite": ("DROP TRIGGER tests_keep",),
}


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Iterator[str]:
    """Keep the old value of a column in every third row."""
    column: str = request.param
    with connection.cursor() as cursor:
        for statement in CREATE[connection.vendor]:
            cursor.execute(statement.format(column))
        try:
            yield column
        finally:
            for statement in DROP[connection.vendor]:
                cursor.execute(statement)


NO_CLAIM: dict[str, Any] = {"claim": None, "claimed_at": None}
CASES: list[Any] = [
    pytest.param("done", the.at_most_once, NO_CLAIM, id="flip"),
    pytest.param("claimed", the.at_most_once, {}, id="claim"),
    pytest.param("claimed_at", the.at_most_once, {}, id="time of the claim"),
    pytest.param("leased_until", the.at_least_once, {}, id="lease"),
]
#: Of a claim that was requeued, and of a lease that lapsed.
EARLIER = {
    "claimed_at": datetime(2026, 1, 1, tzinfo=UTC),
    "leased_until": datetime(2026, 1, 1, tzinfo=UTC),
}


@pytest.mark.parametrize("before", [{}, EARLIER], ids=["at first", "again"])
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize(("kept", "make", "options"), CASES, indirect=["kept"])
def test_a_row_whose_mark_is_not_kept_is_not_handled(
    kept: str, make: Any, options: Any, size: int, before: dict[str, Any]
) -> None:
    rows = the.errands(9, **before)
    handled: list[int] = []
    run = make(lambda row: handled.append(row.place), batch_size=size, **options)
    report = run()
    assert_run(report, processed=6, failed=3)
    assert all(isinstance(each.error, ProcessorError) for each in report.failures)
    assert all(repr(kept) in str(each.error) for each in report.failures)
    # No other row is left for the next run to try its claim on.
    with pytest.raises(ProcessorError):
        run()
    assert handled == [0, 1, 3, 4, 6, 7]
    refused = Errand.objects.filter(place__in=[2, 5, 8])
    assert refused.filter(done=False, result="", attempts=0).count() == 3
    assert [the.state(row)["done"] for row in rows] == [True, True, False] * 3
