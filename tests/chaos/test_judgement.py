"""The judgement finds what is wrong, in records that are made wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.audit import Call
from tests.chaos.blows import Blow
from tests.chaos.judgement import Records, Row, Terms, judge
from tests.chaos.table import MODELS

DELIVERIES = MODELS["one-table"]
KILL = Blow("kill_worker", began=10.5, ended=10.6, pids={71})
ELSEWHERE = replace(KILL, pids={99})
CALL = Call(place=0, pk=1, pid=71, route="direct", began=10.0, ended=10.1)
AGAIN = replace(CALL, pid=73, began=12.0, ended=12.1)
KILLED = replace(CALL, ended=None)
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
    assert faults(delivery, GOOD) == []
    assert faults("at_most_once", IN_DOUBT) == []


HALF, DEAD = Row(1, done=True, noted=True), Row(1, dead=True)


@pytest.mark.parametrize(
    ("delivery", "wrong", "fault"),
    [
        *((each, {"calls": []}, "is lost: it is done, and no handler") for each in DELIVERIES),
        *((each, {"settled": {1: 2}}, "is done, and was settled 2 times") for each in DELIVERIES),
        *((each, {"rows": [HALF]}, "is half settled: it is done, and") for each in DELIVERIES),
        *((each, {"rows": [Row(1)], "settled": {}}, "is left: it is still") for each in DELIVERIES),
        ("transactional", {"worked": {1: 2}}, "was worked on 2 times in the database"),
        ("transactional", {"calls": [CALL, AGAIN], "blows": []}, "was handled again for no reason"),
        ("at_most_once", {"calls": [CALL, AGAIN]}, "was handled 2 times"),
        ("at_most_once", {"in_doubt": {1}}, "is in doubt and not claimed"),
        ("at_least_once", {"rows": [DEAD], "settled": {}}, "was given up on"),
    ],
)
def test_a_broken_promise_is_found(delivery: str, wrong: dict[str, Any], fault: str) -> None:
    [found] = faults(delivery, replace(GOOD, **wrong))
    assert found.startswith(f"row 1 {fault}")


def test_a_doubt_needs_a_reason_and_is_seen() -> None:
    assert faults("at_most_once", replace(IN_DOUBT, in_doubt=())) == [
        "row 1 is claimed and not in doubt"
    ]
    assert faults("at_most_once", replace(IN_DOUBT, blows=[])) == [
        "row 1 is in doubt for no reason"
    ]


@pytest.mark.parametrize(
    ("backend", "blow", "explained"),
    [
        (5, KILL, True),
        (5, ELSEWHERE, False),
        (5, replace(KILL, began=12.5, ended=12.6), False),
        (5, Blow("terminate", 10.5, 10.5, backends={5}), True),
        (6, Blow("terminate", 10.5, 10.5, backends={5}), False),
        (6, Blow("restart_fast", 10.5, 10.9, routes=("direct", "wire")), True),
        (6, Blow("half_open", 10.5, 10.9, routes=("wire",)), False),
    ],
)
def test_a_repeat_is_explained_by_a_blow_that_hit_it_alone(
    backend: int, blow: Blow, explained: bool
) -> None:
    calls = [replace(KILLED, backend=backend), AGAIN]
    found = faults("transactional", replace(GOOD, calls=calls, blows=[blow]))
    assert found == [] if explained else found == ["row 1 was handled again for no reason"]


# --- the rows of one key

NEXT = replace(CALL, pk=2, pid=72, began=10.2, ended=10.3)
BESIDE = replace(NEXT, began=10.05)
AT_ONCE = ["rows 1 and 2 of key 7 were handled at the same time"]


def of_key(*calls: Call, blow: Blow = KILL, **others: Any) -> Records:
    """Return the records of the rows of a key, with these calls."""
    numbers = {call.pk for call in calls}
    return replace(
        GOOD,
        rows=[Row(pk, done=True, key="7") for pk in sorted(numbers)],
        calls=calls,
        worked=dict.fromkeys(numbers, 1),
        settled=dict.fromkeys(numbers, 1),
        blows=[blow],
        **others,
    )


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rows_of_a_key_are_handled_one_after_another_and_in_order(delivery: str) -> None:
    overtaken = of_key(NEXT, replace(CALL, began=10.4, ended=10.5))
    assert faults(delivery, of_key(CALL, NEXT), most=1, in_order=True) == []
    assert faults(delivery, overtaken, most=1, in_order=True) == [
        "row 2 was handled before row 1 of key 7"
    ]
    assert faults(delivery, of_key(CALL, BESIDE), most=1) == AT_ONCE
    assert faults(delivery, of_key(CALL, BESIDE), most=2) == []


def test_rows_of_a_key_may_meet_when_a_session_or_a_lease_has_ended() -> None:
    """The handler goes on, and has lost its key; a claim does not lapse."""
    calls = replace(CALL, ended=20.0), replace(NEXT, began=13.0, ended=13.1)
    hit, missed = of_key(*calls), of_key(*calls, blow=ELSEWHERE)
    assert faults("transactional", hit, most=1) == []
    assert faults("transactional", missed, most=1) == AT_ONCE
    assert faults("at_least_once", missed, most=1) == []
    assert faults("at_most_once", hit, most=1) == AT_ONCE


def test_a_row_in_doubt_has_its_key_until_a_person_requeues_it() -> None:
    decided: dict[str, Any] = {"decided": {1: [11.0]}}
    later = replace(NEXT, began=13.0, ended=13.1)
    right = of_key(KILLED, AGAIN, later, **decided)
    assert faults("at_most_once", right, most=1, in_order=True) == []
    early = of_key(KILLED, NEXT, AGAIN, **decided)
    assert AT_ONCE[0] in faults("at_most_once", early, most=1)
    third = replace(AGAIN, pid=74, began=13.0, ended=13.1)
    more = of_key(KILLED, AGAIN, third, **decided)
    assert "row 1 was handled 3 times" in faults("at_most_once", more)
