"""Whatever the database answers to one row, wherever: the others are done, and it is that row's."""

from __future__ import annotations

import pytest

from tests.contract.support.heartbeat import beat_soon

from .cells import Cell, chosen
from .judge import judge

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize("cell", chosen(), ids=str)
def test_a_row_that_the_database_refuses(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "dcl_processor")
    if cell.stage == "renewal":
        beat_soon(monkeypatch)
    judge(cell)
