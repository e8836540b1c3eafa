"""Two workers share the rows; beats overlap; a worker is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.conftest import Cluster, at_the_gate, done, errands, first_waits, got, work
from tests.cluster.processes import Started, beat, worker
from tests.cluster.processors import MEETS, PLAIN
from tests.edge.manage import at_gate
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)


def test_copies_on_two_workers_share_the_rows_and_handle_each_once(
    cluster: Cluster, both: tuple[Started, Started]
) -> None:
    rows = errands(*[MEETS] * 200)
    first = cluster.send(workers=4, timeout=PATIENCE)
    reports = [got(first), *(got(each) for each in first.children)]
    assert len(reports) == 4
    assert sum(report["processed"] for report in reports) == len(rows)
    assert {report["stopped"] for report in reports} == {"drained"}
    assert cluster.took_part() == {worker.pid for worker in both}
    assert done() == set(rows)
    assert cluster.effects() == work() == Counter(rows)


def test_overlapping_beats_do_no_harm(cluster: Cluster, both: tuple[Started, Started]) -> None:
    rows = first_waits()
    with beat(cluster.folder, cluster.variables):
        at_the_gate(cluster)
        so_far = len(cluster.runs())
        # The first is held by its handler all the while, and the others have been done.
        until(lambda: len(cluster.runs()) >= so_far + 4, "further beats")
        until(lambda: done() == set(rows[1:]), "the other rows")
        assert cluster.effects() == Counter(rows)
        cluster.open_gate()
        until(lambda: done() == set(rows), "the first row")
        so_far = len(cluster.runs())
        until(lambda: len(cluster.runs()) >= so_far + 2, "runs with nothing to do")
    cluster.come_to_rest()
    assert cluster.effects() == work() == Counter(rows)


def test_further_copies_go_where_the_first_came_from(
    cluster: Cluster, both: tuple[Started, Started]
) -> None:
    rows = errands(PLAIN, PLAIN)
    with worker(
        cluster.folder, "apart", "--queues=apart", size=1, variables=cluster.variables
    ) as apart:
        first = cluster.send(options={"queue": "apart"}, workers=2, limit=2)
        assert [got(first)["processed"], len(first.children)] == [1, 1]
        assert got(first.children[0])["processed"] == 1
        assert cluster.took_part() == {apart.pid}
    assert done() == set(rows)


def test_the_other_worker_finishes_what_a_lost_one_leaves(cluster: Cluster) -> None:
    rows = first_waits() + errands(*[PLAIN] * 20)
    arguments = (cluster.folder, "lost", "--queues=lost")
    others = (cluster.folder, "other", "--queues=other")
    with (
        worker(*arguments, size=1, variables=cluster.variables) as lost,
        worker(*others, size=1, variables=cluster.variables) as other,
    ):
        cluster.send(options={"queue": "lost"})
        at_gate(cluster.gate)
        result = cluster.send(options={"queue": "other"}, wait_for_locked=PATIENCE)
        until(lambda: len(done()) == len(rows) - 1, "the rows that are not locked")
        # The pool's process would find the gate open and go on, so all of it goes.
        lost.kill()
        cluster.open_gate()
        assert got(result)["processed"] == len(rows)
        assert cluster.took_part() == {lost.pid, other.pid}
    assert done() == set(rows)
    # Work in the database is done once; what is outside may be repeated for the row at hand.
    assert work() == Counter(rows)
    assert cluster.effects() == Counter([*rows, rows[0]])
