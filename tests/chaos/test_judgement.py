"""The judgement finds what is wrong, in records that are made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import audit, figures
from tests.chaos.audit import Call
from tests.chaos.blows import Blow
from tests.chaos.judgement import Records, Row, judge
from tests.chaos.table import MODELS

DELIVERIES = MODELS["one-table"]
KILL = Blow("kill_worker", began=10.5, ended=10.6, pids={71})
CALL = Call(place=0, pk=1, pid=71, route="direct", began=10.0, ended=10.1)
GOOD = Records(
    rows=[Row(1, done=True)],
    calls=[CALL],
    worked={1: 1},
    settled={1: 1},
    in_doubt=(),
    blows=[KILL],
)
IN_DOUBT = replace(GOOD, rows=[Row(1, claimed=True)], settled={}, in_doubt={1})


def faults(delivery: str, records: Records) -> list[str]:
    """Return the first line of each fault, which is followed by the row's history."""
    return [fault.split(" (")[0] for fault in judge(delivery, records).faults]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_what_is_right_has_no_faults(delivery: str) -> None:
    verdict = judge(delivery, GOOD)
    assert verdict.faults == []
    assert verdict.counts["rows"] == verdict.counts["called_1"] == verdict.counts["done"] == 1


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_loss_is_found(delivery: str) -> None:
    assert faults(delivery, replace(GOOD, calls=[])) == [
        "row 1 is lost: it is done, and no handler was called"
    ]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_row_that_is_settled_in_one_table_is_found(delivery: str) -> None:
    half = replace(GOOD, rows=[Row(1, done=True, noted=True)])
    assert faults(delivery, half) == [
        "row 1 is half settled: it is done, and its lease or attempts are still there"
    ]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_row_that_is_left_is_found(delivery: str) -> None:
    left = replace(GOOD, rows=[Row(1)], settled={})
    assert faults(delivery, left) == ["row 1 is left: it is still pending at the end"]


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("times", [0, 2])
def test_a_settlement_that_is_missing_or_doubled_is_found(delivery: str, times: int) -> None:
    assert faults(delivery, replace(GOOD, settled={1: times})) == [
        f"row 1 is done, and was settled {times} times"
    ]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_settlement_that_is_not_seen_in_the_row_is_found(delivery: str) -> None:
    undone = replace(GOOD, rows=[Row(1, claimed=True)], in_doubt={1})
    assert "row 1 is not done, and was settled 1 times" in faults(delivery, undone)


@pytest.mark.parametrize("times", [0, 2])
def test_work_in_the_database_that_is_lost_or_doubled_is_found(times: int) -> None:
    assert faults("transactional", replace(GOOD, worked={1: times})) == [
        f"row 1 was worked on {times} times in the database"
    ]


def test_a_repeat_is_explained_by_a_kill_of_its_process_and_by_nothing_else() -> None:
    again = replace(CALL, pid=72, began=11.0, ended=11.1)
    repeated = replace(GOOD, calls=[replace(CALL, ended=None), again])
    assert faults("transactional", repeated) == []
    for blow in (
        replace(KILL, pids={73}),
        replace(KILL, began=11.5, ended=11.6),
        replace(KILL, began=1.0, ended=1.1),
        replace(KILL, kind="kill_watcher", pids={70}, routes=("direct",)),
    ):
        unexplained = replace(repeated, blows=[blow])
        assert faults("transactional", unexplained) == ["row 1 was handled again for no reason"]
        assert judge("at_least_once", unexplained).counts["unexplained"] == 1


def test_a_kill_explains_nothing_of_the_row_before_the_one_at_hand() -> None:
    next_row = replace(CALL, pk=2, began=10.2, ended=10.3)
    again = replace(CALL, pid=72, began=11.0, ended=11.1)
    two = replace(
        GOOD,
        rows=[Row(1, done=True), Row(2, done=True)],
        calls=[CALL, next_row, again],
        worked={1: 1, 2: 1},
        settled={1: 1, 2: 1},
    )
    assert faults("transactional", two) == ["row 1 was handled again for no reason"]


@pytest.mark.parametrize(
    ("backend", "blow", "explained"),
    [
        (5, Blow("terminate", 10.5, 10.5, backends={5}), True),
        (None, Blow("terminate", 10.5, 10.5, backends={5}), True),
        (6, Blow("terminate", 10.5, 10.5, backends={5}), False),
        (6, Blow("restart_fast", 10.5, 10.9, routes=("direct", "wire")), True),
        (6, Blow("half_open", 10.5, 10.9, routes=("wire",)), False),
        (6, Blow("hold_snapshot", 10.5, 10.9), False),
    ],
)
def test_the_end_of_a_session_explains_what_was_done_in_it(
    backend: int | None, blow: Blow, explained: bool
) -> None:
    calls = [replace(CALL, backend=backend), replace(CALL, pid=72, began=11.0)]
    found = faults("transactional", replace(GOOD, calls=calls, blows=[blow]))
    assert (found == []) is explained


def test_a_double_is_never_excused_at_most_once() -> None:
    again = replace(CALL, pid=72, began=11.0, ended=11.1)
    twice = replace(GOOD, calls=[CALL, again])
    assert faults("at_most_once", twice) == ["row 1 was handled 2 times"]


def test_in_doubt_is_what_is_claimed_and_not_settled() -> None:
    assert faults("at_most_once", IN_DOUBT) == []
    assert faults("at_most_once", replace(IN_DOUBT, calls=[])) == []
    assert faults("at_most_once", replace(IN_DOUBT, in_doubt=())) == [
        "row 1 is claimed and not in doubt"
    ]
    assert faults("at_most_once", replace(GOOD, in_doubt={1})) == [
        "row 1 is in doubt and not claimed"
    ]
    assert faults("at_most_once", replace(IN_DOUBT, blows=[])) == [
        "row 1 is in doubt for no reason"
    ]


def test_a_row_that_was_given_up_on_is_found() -> None:
    given_up = replace(GOOD, rows=[Row(1, dead=True)], settled={})
    assert faults("at_least_once", given_up) == ["row 1 was given up on"]


def test_a_fault_is_told_with_the_rows_history() -> None:
    [fault] = judge("transactional", replace(GOOD, worked={1: 2})).faults
    assert fault.splitlines() == [
        "row 1 was worked on 2 times in the database (worked 2, settled 1):",
        "    +0.000 s  process 71 on direct begins",
        "    +0.100 s  process 71 ends",
        "    +0.500 s  kill_worker [71] ",
    ]


def test_the_audit_gives_back_what_was_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit"
    monkeypatch.setenv("CHAOS_AUDIT", str(path))
    monkeypatch.setenv("CHAOS_ROUTE", "wire")
    audit._file.cache_clear()
    for pk in (1, 2):
        audit.note("begin", 0, pk)
    audit.note("worked", 0, 1, 99)
    audit.note("end", 0, 1)
    audit.note("raised", 0, 2, "OperationalError")
    first, second = audit.read(path)
    assert (first.pk, first.route, first.backend, first.raised) == (1, "wire", 99, "")
    assert first.ended is not None
    assert first.began <= second.began <= first.ended
    assert (second.ended, second.raised) == (None, "OperationalError")


def test_figures_count_a_row_once_and_a_kill_by_who_comes_after() -> None:
    calls = [
        CALL,
        replace(CALL, pid=72, began=10.7, ended=10.8),
        replace(CALL, pk=2, pid=72, began=11.0, ended=11.5),
        replace(CALL, pk=3, pid=73, began=11.0, ended=13.6),
    ]
    assert figures.rate(calls, (10.0, 12.0)) == 1.0
    assert figures.longest_pause(calls, (10.0, 14.0)) == pytest.approx(2.1)
    kill = replace(KILL, routes=("direct",))
    restart = Blow("restart_fast", 10.2, 10.6, routes=("direct",))
    found = figures.recoveries(calls, [kill, restart, replace(restart, routes=("wire",))], 14.0)
    assert found == {
        "kill_worker": [pytest.approx(0.2)],
        "restart_fast": [pytest.approx(0.2)],
    }
