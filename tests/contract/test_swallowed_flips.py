"""A trigger that drops the flip without an error: the row is there, and has not left pending."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from dcl_processor import batch_processor
from dcl_processor.exceptions import ProcessorError
from tests.contract import errands as the
from tests.models import Errand

CREATE = {
    "postgresql": (
        """CREATE FUNCTION tests_drop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.done AND OLD.place % 3 = 2 THEN RETURN NULL; END IF; RETURN NEW; END $$""",
        """CREATE TRIGGER tests_drop BEFORE UPDATE ON tests_errand FOR EACH ROW
        EXECUTE FUNCTION tests_drop()""",
    ),
    "sqlite": (
        """CREATE TRIGGER tests_drop BEFORE UPDATE ON tests_errand FOR EACH ROW
        WHEN NEW.done AND OLD.place % 3 = 2 BEGIN SELECT RAISE(IGNORE); END""",
    ),
}
DROP = {
    "postgresql": ("DROP TRIGGER tests_drop ON tests_errand", "DROP FUNCTION tests_drop"),
    "sqlite": ("DROP TRIGGER tests_drop",),
}

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def dropped() -> Iterator[None]:
    """Drop the flip of every third row."""
    with connection.cursor() as cursor:
        for statement in CREATE[connection.vendor]:
            cursor.execute(statement)
        try:
            yield
        finally:
            for statement in DROP[connection.vendor]:
                cursor.execute(statement)


@pytest.mark.usefixtures("dropped")
@pytest.mark.parametrize("size", [1, 6])
def test_a_row_whose_flip_was_dropped_has_failed(size: int) -> None:
    the.errands(9)
    pending = Errand.objects.filter(done=False)
    run = batch_processor(pending=pending, done={"done": True}, batch_size=size)(the.ignore)
    report = run()
    assert (report.processed, report.failed) == (6, 3)
    assert all(isinstance(each.error, ProcessorError) for each in report.failures)
    assert all("although they are there" in str(each.error) for each in report.failures)
    assert list(pending.order_by("place").values_list("place", flat=True)) == [2, 5, 8]
