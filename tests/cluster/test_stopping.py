"""I10: a soft time limit, a revocation and a worker that shuts down end the run, not the row."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, done, first_waits, got, told_to_stop, untouched, work
from tests.cluster.processes import Started, worker
from tests.gates import at_gate
from tests.models import Errand
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)


def only_the_first_is_done(cluster: Cluster, rows: list[int]) -> None:
    assert done() == {rows[0]}
    assert untouched(rows[1:])
    assert Errand.objects.get(pk=rows[0]).attempts in {0, 1}
    assert cluster.effects() == work() == Counter(rows[:1])


def the_rest_follows(cluster: Cluster, rows: list[int]) -> None:
    assert got(cluster.send())["processed"] == 2
    assert done() == set(rows)
    assert cluster.effects() == work() == Counter(rows)


def at_the_gate_in_time(cluster: Cluster) -> Any:
    """Send the task, again if its limit came before a row was at the gate."""
    result = cluster.send(options={"soft_time_limit": 2})

    def is_there() -> bool:
        return any(cluster.gate.glob("reached-*"))

    until(lambda: is_there() or result.ready(), "a row at the gate, or the limit")
    return result if is_there() else at_the_gate_in_time(cluster)


def test_i10_a_soft_time_limit_ends_the_run_after_the_row_at_hand(
    cluster: Cluster, one: Started
) -> None:
    rows = first_waits()
    result = at_the_gate_in_time(cluster)
    told_to_stop(cluster)
    cluster.open_gate()
    report = got(result)
    assert (report["processed"], report["failed"], report["stopped"]) == (1, 0, "signal")
    only_the_first_is_done(cluster, rows)
    the_rest_follows(cluster, rows)


def test_i10_a_revocation_ends_the_run_after_the_row_at_hand(
    cluster: Cluster, one: Started
) -> None:
    rows = first_waits()
    pool = one.pool()
    result = cluster.send()
    at_gate(cluster.gate)
    result.revoke(terminate=True)
    told_to_stop(cluster)
    cluster.open_gate()
    again = cluster.app.AsyncResult
    until(lambda: again(result.id).state == "SUCCESS", "the report, in place of REVOKED")
    assert got(again(result.id))["stopped"] == "signal"
    only_the_first_is_done(cluster, rows)
    the_rest_follows(cluster, rows)
    assert one.pool() == pool


def test_i10_a_worker_that_shuts_down_ends_the_run_after_the_row_at_hand(cluster: Cluster) -> None:
    rows = first_waits()
    with worker(
        cluster.folder, "leaving", "--queues=leaving", size=1, variables=cluster.variables
    ) as leaving:
        result = cluster.send(options={"queue": "leaving"})
        at_gate(cluster.gate)
        leaving.process.send_signal(signal.SIGTERM)
        told_to_stop(cluster)
        cluster.open_gate()
        assert leaving.process.wait(PATIENCE) == 0
    report = got(result)
    assert (report["processed"], report["failed"], report["stopped"]) == (1, 0, "signal")
    only_the_first_is_done(cluster, rows)
