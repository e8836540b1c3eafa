"""What a project sets for its sessions, or puts around its cursors."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run

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
