"""The database ends a run's session between two of its looks for rows."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from dcl_processor import batch_processor
from dcl_processor.pending import scan
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.crash import processors
from tests.crash.rows import ROWS, fresh, those
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize("order", [(), ("pk",)], ids=["by key", "in order"])
@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_session_that_ends_between_two_looks_costs_the_run_nothing(
    look: int, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window is asked for afresh; its row alone is read then, and no lock was held."""
    fresh(*ROWS)
    monkeypatch.setattr(scan, "WINDOW", 1)
    looks = 0

    def pending() -> Any:
        nonlocal looks
        looks += 1
        if looks == look:
            end_session(connections["other"])
        return Errand.objects.filter(done=False).order_by(*order)

    errand = batch_processor(**{**processors.plain, "pending": pending})(lambda row: None)
    assert_run(errand(using="other"), processed=3)
    assert looks >= look
    assert those(lambda row: row.done) == set(ROWS)
