"""A trigger that keeps what a claim or a flip was to overwrite, in some rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection

from dcl_processor import batch_processor
from dcl_processor.exceptions import ProcessorError, StillPending
from tests.contract.support import errands as the
from tests.contract.support.batches import statements
from tests.contract.support.reports import assert_run
from tests.models import Errand, Express

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


# Elsewhere nothing looks for triggers, and such a row counts as processed in every run.
if connection.vendor == "postgresql":
    AFTER = (
        """CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF OLD.place % 3 = 2 THEN UPDATE tests_errand SET done = OLD.done WHERE id = OLD.id;
        END IF; RETURN NULL; END $$""",
        """CREATE TRIGGER tests_keep AFTER UPDATE ON tests_errand FOR EACH ROW
        WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION tests_keep()""",
    )
    FLIPS: list[Any] = [
        pytest.param(the.transactional, {}, id="transactional"),
        pytest.param(
            the.at_most_once, {"done": {"done": True, "claimed": False}}, id="at most once"
        ),
        pytest.param(the.at_least_once, {}, id="at least once"),
    ]

    @pytest.fixture
    def put_back(request: pytest.FixtureRequest, kept: str) -> None:
        """Put the flip back in every third row, before or after the row is written."""
        if request.param == "AFTER":
            with connection.cursor() as cursor:
                for statement in (*DROP["postgresql"], *AFTER):
                    cursor.execute(statement)

    @pytest.mark.parametrize("kept", ["done"], indirect=True)
    @pytest.mark.parametrize("put_back", ["BEFORE", "AFTER"], indirect=True)
    @pytest.mark.parametrize("size", [1, 6])
    @pytest.mark.parametrize(("make", "options"), FLIPS)
    def test_a_row_whose_flip_is_put_back_fails_by_name(
        kept: str, put_back: None, make: Any, options: Any, size: int
    ) -> None:
        rows = the.errands(9)
        report = make(the.ignore, batch_size=size, **options)()
        assert_run(report, processed=6, failed=3)
        assert all(isinstance(each.error, StillPending) for each in report.failures)
        assert {each.pk for each in report.failures} == {rows[place].pk for place in (2, 5, 8)}
        assert [the.state(row)["done"] for row in rows] == [True, True, False] * 3

    def asked(*triggers: str, does: str = "NEW.done = OLD.done") -> int:
        """Return how many statements a run of two rows sends with these triggers."""
        Errand.objects.all().delete()
        the.errands(2)
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF NEW.place < 0 AND NOT NEW.done THEN {does}; END IF; RETURN NEW; END $$"
            )
            for trigger in triggers:
                cursor.execute(trigger)
        try:
            with statements() as seen:
                assert_run(the.transactional(the.ignore)(), processed=2)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP FUNCTION tests_keep CASCADE")
        return len(seen)

    def test_only_a_trigger_that_may_put_a_flip_back_costs_a_question() -> None:
        """None that is disabled, does not fire for an UPDATE, or writes to other columns."""
        enabled = CREATE["postgresql"][1]
        disabled = "ALTER TABLE tests_errand DISABLE TRIGGER tests_keep"
        of_inserts = enabled.replace("UPDATE", "INSERT")
        assert asked() == asked(enabled, disabled) == asked(of_inserts) < asked(enabled)
        assert asked() == asked(enabled, does="NEW.result = 'touched'")
        assert asked() == asked(enabled, does="PERFORM 1 WHERE TG_OP = 'UPDATE'")
        for does in ("NEW := OLD", 'NEW."done" := FALSE', "RETURN OLD", "SELECT OLD.* INTO NEW"):
            assert asked() < asked(enabled, does=does), does
        assert asked() < asked(enabled, does="UPDATE tests_errand SET done = FALSE WHERE id < 0")

    @pytest.mark.parametrize("kept", ["done"], indirect=True)
    def test_a_row_that_may_stay_pending_is_not_asked_about(kept: str) -> None:
        the.errands(3)
        assert_run(the.transactional(the.ignore, repeats=True)(), processed=3)

    def test_a_trigger_on_the_parents_table_is_looked_for_as_well() -> None:
        for _ in range(3):
            Express.objects.create()
        third = Express.objects.order_by("pk")[2].pk
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF OLD.id = {third} THEN NEW.done = OLD.done; END IF; RETURN NEW; END $$"
            )
            cursor.execute(
                "CREATE TRIGGER tests_keep BEFORE UPDATE ON tests_freight FOR EACH ROW "
                "EXECUTE FUNCTION tests_keep()"
            )
        try:
            pending = Express.objects.filter(done=False)
            report = batch_processor(pending=pending, done={"done": True})(the.ignore)()
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP FUNCTION tests_keep CASCADE")
        assert_run(report, processed=2, failed=1)
        assert [each.pk for each in report.failures] == [third]
