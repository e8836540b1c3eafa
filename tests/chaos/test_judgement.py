"""The judgement finds what is wrong, in records that are made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import audit, figures
from tests.chaos.audit import Call
from tests.chaos.blows import Blow
from tests.chaos.judgement import Records, Row, Terms, judge
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


def faults(delivery: str, records: Records, *, most: int = 0, in_order: bool = False) -> list[str]:
    """Return the first line of each fault, which is followed by the row's history."""
    verdict = judge(Terms(delivery, most=most, in_order=in_order), records)
    return [fault.split(" (")[0] for fault in verdict.faults]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_what_is_right_has_no_faults(delivery: str) -> None:
    verdict = judge(Terms(delivery), GOOD)
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
        assert judge(Terms("at_least_once"), unexplained).counts["unexplained"] == 1


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


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_kill_explains_a_row_before_that_was_locked_at_its_settlement(is_locked: bool) -> None:
    next_row = replace(CALL, pk=2, began=10.2, ended=10.3)
    two = replace(
        IN_DOUBT,
        rows=[Row(1, claimed=True), Row(2, done=True)],
        calls=[CALL, next_row],
        settled={2: 1},
        blows=[KILL, *[Blow("lock_rows", began=10.05, ended=11.0)] * is_locked],
    )
    expected = [] if is_locked else ["row 1 is in doubt for no reason"]
    assert faults("at_most_once", two) == expected


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


def test_the_end_of_a_session_explains_the_next_row_of_its_worker_and_no_further_one() -> None:
    again = replace(CALL, pid=72, began=11.0)
    blow = Blow("restart_fast", 1.0, 2.0, routes=("direct",))
    for before, found in ((0.5, []), (9.0, ["row 1 was handled again for no reason"])):
        calls = [replace(CALL, before=before), again]
        assert faults("transactional", replace(GOOD, calls=calls, blows=[blow])) == found


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


def of_key(*calls: Call, blow: Blow = KILL) -> Records:
    """Return the records of the rows of a key, with these calls."""
    numbers = {call.pk for call in calls}
    return replace(
        GOOD,
        rows=[Row(pk, done=True, key="7") for pk in sorted(numbers)],
        calls=calls,
        worked=dict.fromkeys(numbers, 1),
        settled=dict.fromkeys(numbers, 1),
        blows=[blow],
    )


NEXT = replace(CALL, pk=2, pid=72, began=10.2, ended=10.3)
BESIDE = replace(NEXT, began=10.05)
ELSEWHERE = replace(KILL, pids={99})
AT_ONCE = ["rows 1 and 2 of key 7 were handled at the same time"]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rows_of_a_key_are_handled_one_after_another_and_in_order(delivery: str) -> None:
    def found(*calls: Call, in_order: bool = True) -> list[str]:
        return faults(delivery, of_key(*calls), most=1, in_order=in_order)

    overtaken = NEXT, replace(CALL, began=10.4, ended=10.5)
    assert found(CALL, NEXT) == []
    assert found(*overtaken) == ["row 2 was handled before row 1 of key 7"]
    assert found(*overtaken, in_order=False) == []
    assert found(CALL, BESIDE) == AT_ONCE


def test_rows_of_a_key_may_meet_when_a_session_or_a_lease_has_ended() -> None:
    """The handler goes on, and has lost its key."""
    calls = replace(CALL, ended=20.0), replace(NEXT, began=13.0, ended=13.1)
    hit, missed = of_key(*calls), of_key(*calls, blow=ELSEWHERE)
    assert faults("transactional", hit, most=1) == []
    assert faults("transactional", missed, most=1) == AT_ONCE
    assert faults("at_least_once", missed, most=1) == []
    # It may even begin when other workers have handled the next rows.
    late = NEXT, replace(CALL, began=10.6, ended=10.7)
    assert faults("transactional", of_key(*late), most=1, in_order=True) == []
    # A claim does not lapse.
    assert faults("at_most_once", hit, most=1) == AT_ONCE


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_more_rows_of_a_key_at_once_than_allowed_are_found(delivery: str) -> None:
    """Also if each of them meets only some of the others, or the first one ends last."""
    long = replace(CALL, ended=12.0)
    third = replace(CALL, pk=3, pid=73, began=10.25, ended=10.4)
    assert faults(delivery, of_key(CALL, BESIDE), most=2) == []
    assert faults(delivery, of_key(CALL, BESIDE, third), most=2) == []
    assert faults(delivery, of_key(long, NEXT, third), most=2) == [
        "rows 1 and 2 and 3 of key 7 were handled at the same time"
    ]
    assert faults(delivery, of_key(long, NEXT, replace(third, began=10.35)), most=2) == []


def test_a_call_that_was_killed_has_its_key_until_the_kill() -> None:
    killed = replace(CALL, ended=None)
    later = replace(NEXT, began=11.0, ended=11.1)
    again = replace(CALL, pid=73, began=12.0, ended=12.1)
    for delivery in ("transactional", "at_least_once"):
        assert faults(delivery, of_key(killed, later, again), most=1) == []
        assert AT_ONCE[0] in faults(delivery, of_key(killed, NEXT, again), most=1)
        # Its death is not known; it is reported once.
        last = replace(later, pk=3, began=11.5, ended=11.6)
        missed = of_key(killed, later, last, blow=ELSEWHERE)
        assert [each for each in faults(delivery, missed, most=1) if "key" in each] == AT_ONCE


def test_a_handler_that_raised_has_its_key_no_more() -> None:
    raised = replace(CALL, ended=None, raised="OperationalError", raised_at=10.1)
    again = replace(CALL, pid=73, began=10.4, ended=10.45)
    blow = Blow("terminate", 10.05, 10.05, backends={5})
    hit = replace(raised, backend=5)
    assert faults("transactional", of_key(hit, NEXT, again, blow=blow), most=1) == []
    unhit = of_key(raised, NEXT, again, blow=ELSEWHERE)
    assert faults("transactional", unhit, most=1) == ["row 1 was handled again for no reason"]


def requeued(*calls: Call, at: float, **others: Any) -> Records:
    """Return the records of a key whose first row a person has put back."""
    return replace(of_key(*calls), decided={1: [at]}, **others)


KILLED = replace(CALL, ended=None)
AGAIN = replace(CALL, pid=73, began=12.0, ended=12.1)


def test_a_row_that_a_person_requeued_may_be_handled_once_more() -> None:
    assert faults("at_most_once", requeued(KILLED, AGAIN, at=11.0)) == []
    twice = ["row 1 was handled 2 times"]
    assert faults("at_most_once", requeued(KILLED, AGAIN, at=12.5)) == twice
    assert faults("at_most_once", requeued(KILLED, AGAIN, at=9.0)) == twice
    third = replace(AGAIN, pid=74, began=13.0, ended=13.1)
    more = requeued(KILLED, AGAIN, third, at=11.0)
    assert "row 1 was handled 3 times" in faults("at_most_once", more)
    verdict = judge(Terms("at_most_once"), requeued(KILLED, AGAIN, at=11.0))
    assert verdict.counts["requeued"] == 1


def test_a_row_that_was_requeued_needs_a_reason_for_its_doubt() -> None:
    assert faults("at_most_once", requeued(KILLED, AGAIN, at=11.0, blows=[ELSEWHERE])) == [
        "row 1 was in doubt for no reason"
    ]


def test_a_row_in_doubt_has_its_key_until_a_person_requeues_it() -> None:
    """Neither the death of its worker nor the end of its handler frees the key."""
    later = replace(NEXT, began=13.0, ended=13.1)
    for first in (KILLED, CALL):
        right = requeued(first, AGAIN, later, at=11.0)
        assert faults("at_most_once", right, most=1, in_order=True) == []
        beside = requeued(first, AGAIN, replace(later, began=12.05), at=11.0)
        assert faults("at_most_once", beside, most=1) == AT_ONCE
        early = requeued(first, NEXT, AGAIN, at=11.0)
        assert AT_ONCE[0] in faults("at_most_once", early, most=1)
        assert faults("at_most_once", early, most=2) == []
        assert faults("at_most_once", early, most=2, in_order=True) == [
            "row 2 was handled before row 1 of key 7"
        ]
        rows = [Row(1, claimed=True, key="7"), Row(2, done=True, key="7")]
        undecided = replace(of_key(first, later), rows=rows, settled={2: 1}, in_doubt={1})
        assert faults("at_most_once", undecided, most=1) == AT_ONCE
        assert faults("at_most_once", undecided, most=2) == []


def test_a_fault_is_told_with_the_rows_history() -> None:
    [fault] = judge(Terms("transactional"), replace(GOOD, worked={1: 2})).faults
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
    assert (first.before, second.before) == (float("-inf"), first.began)
    assert (first.pk, first.route, first.backend, first.raised) == (1, "wire", 99, "")
    assert first.ended is not None
    assert first.over == first.ended
    assert first.began <= second.began <= first.ended
    assert (second.ended, second.raised) == (None, "OperationalError")
    assert second.over is not None
    assert first.ended <= second.over


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
