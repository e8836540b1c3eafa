"""The report as a value: what it says in one line, as JSON and by raising."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from dcl_processor import Report
from dcl_processor.exceptions import RowsFailed
from dcl_processor.report.report import Failure

FAILURE = Failure(uuid.UUID(int=7), ValueError("no address"), "Traceback …")


def test_it_is_ok_unless_rows_failed_or_failures_ended_the_run() -> None:
    assert Report(name="shop.send", processed=3, skipped=1).ok
    assert not Report(name="shop.send", failed=1).ok
    assert not Report(name="shop.send", stopped="failures").ok


def test_raise_for_failures_raises_from_the_first_error() -> None:
    report = Report(name="shop.send", failed=2, failures=(FAILURE,))
    with pytest.raises(RowsFailed, match=r"shop.send: 2 failed in 0.00 s") as raised:
        report.raise_for_failures()
    assert raised.value.__cause__ is FAILURE.error
    assert raised.value.report is report


def test_it_goes_through_json() -> None:
    report = Report(name="shop.send", processed=1, failed=1, failures=(FAILURE,), duration=0.5)
    assert json.loads(json.dumps(report.as_dict())) == {
        "name": "shop.send",
        "processed": 1,
        "failed": 1,
        "discarded": 0,
        "snoozed": 0,
        "skipped": 0,
        "stale": 0,
        "lease_lost": 0,
        "held": 0,
        "to_retry": 0,
        "redone": 0,
        "passes": 0,
        "duration": 0.5,
        "stopped": "drained",
        "ok": False,
        "error": None,
        "failures": [
            {
                "pk": "00000000-0000-0000-0000-000000000007",
                "error": "ValueError('no address')",
                "traceback": "Traceback …",
                "attempt": None,
                "max_attempts": None,
                "again_in": None,
            }
        ],
    }


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (
            {"processed": 3, "skipped": 1, "duration": 1.25, "stopped": "limit"},
            "p: 3 processed, 1 skipped in 1.25 s; stopped by limit",
        ),
        ({"stopped": "failures"}, "p: no row tried in 0.00 s; stopped by failures"),
        ({"processed": 3, "stale": 11_230}, "p: 3 processed in 0.00 s"),
        ({"stale": 2}, "p: all rows done by other workers in 0.00 s"),
        ({}, "p: nothing pending in 0.00 s"),
    ],
)
def test_it_is_one_line_that_leaves_out_what_is_nothing(values: Any, shown: str) -> None:
    assert str(Report(name="p", **values)) == shown
