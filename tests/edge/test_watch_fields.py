"""The fields of the records that a watch logs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dcl_processor.diagnosis import Trouble
from dcl_processor.execution.calls import Call
from dcl_processor.management.watching import _Log
from dcl_processor.processes.beats import AtWork
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.news import Died
from tests.edge.manage import output


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        (["shop.a"], "shop.a", {"processor": "shop.a", "worker": 2}),
        (["shop.a"], None, {"processor": "shop.a", "worker": 2}),
        (["shop.a", "shop.b"], None, {"worker": 2}),
    ],
)
def test_a_worker_that_died_is_named_in_its_record(
    names: list[str],
    name: str | None,
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    written, _, _ = output()
    with caplog.at_level(logging.INFO, "dcl_processor"):
        log = _Log(written, names, Health(names, Stop()))
        log.tell(2, name, Died(Trouble("killed by SIGKILL"), None))
    [record] = caplog.records
    known = {each: vars(record)[each] for each in ("processor", "worker") if each in vars(record)}
    assert known == expected
    assert "killed by SIGKILL" in record.getMessage()


def test_the_line_about_a_dead_worker_has_its_row_and_what_it_leaves() -> None:
    """Nothing else mentions a charge that was cut off, until a person asks."""
    written, _, err = output()
    call = AtWork.of(Call("shop.charge", (17,), None))
    log = _Log(written, ["shop.charge"], Health(["shop.charge"], Stop()), "; rows are in doubt")
    log.tell(2, None, Died(Trouble("killed by SIGKILL"), None, call))
    said = "shop.charge, worker 2: killed by SIGKILL, last seen at row 17 since "
    assert err.getvalue().startswith(said)
    assert err.getvalue().endswith(" of shop.charge; rows are in doubt\n")
