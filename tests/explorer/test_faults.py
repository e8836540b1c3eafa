"""That the search finds what it is for: faults of the engine, each put in at a seam.

A search that finds none of them would find nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import seams

from .schedule import Violation
from .search import Priorities
from .stage import Stage, staged
from .subjects import EVERY

pytestmark = pytest.mark.django_db(transaction=True)

#: Schedules until a fault has to be found.
MOST = 300


def without_its_mark(question: Any, write: Any, xid: Any) -> Any:
    return seams.writing(question, replace(write, expected={}) if xid is None else write, xid)


def in_any_transaction(session: Any, question: Any, writes: Any, _: Any) -> Any:
    [[xid]] = session.execute("SELECT pg_current_xact_id()::text")
    return seams.written(session, question, writes, xid)


def claim_and_flip(run: Any, batch: Any) -> None:
    seams.claim(run, batch)
    if pks := [row.pk for row in batch.rows]:
        run.session.commit(batch.question, [seams.Write({"done": True}, pks)])


def of_any_row(heart: Any, question: Any, pks: Any) -> set[Any]:
    seams.renew_any(heart, question.table.filter(pk__in=pks), pks)
    return {*pks}


def by_one_look(session: Any, question: Any, wanted: Any) -> Any:
    return seams.claimed_by(session, replace(question, own_table=True), wanted)


ONE_LOOK: list[tuple[seams.Seam, Any]] = [(seams.CLAIMED_BY, by_one_look)]

TWICE = "row 1 was handled after its flip was committed"
#: The subject, its setting, what is replaced by what, and what the search says then.
FAULTS: dict[str, tuple[str, dict[str, Any], list[tuple[seams.Seam, Any]], str]] = {
    # The stage knows the step by these words.
    "no lock": ("transactional", {}, [(seams.LOCK, f"/* {seams.part(seams.LOCK)} */")], TWICE),
    "one look, of work in the transaction": ("transactional_spanning", {}, ONE_LOOK, TWICE),
    "one look, of claims": ("claim_spanning", {}, ONE_LOOK, TWICE),
    "one look, of leases": ("lease_spanning", {}, ONE_LOOK, TWICE),
    "a settlement without its mark": (
        "lease",
        {"lapse": True},
        [(seams.WRITING, without_its_mark)],
        "2 rows were reported as processed",
    ),
    "a flip in another transaction": (
        "transactional_ending",
        {},
        [(seams.WRITTEN, in_any_transaction), (seams.RELEASE, seams.NOTHING)],
        "1 rows were reported as processed",
    ),
    "a flip before the work": (
        "transactional",
        {},
        [(seams.CLAIM, claim_and_flip)],
        "copy A flipped row 1 without a handler",
    ),
    "a renewal of any row": (
        "lease",
        {"hearts": 1},
        [(seams.RENEWAL, of_any_row)],
        "are done, and have a lease",
    ),
    "no lock of the key": (
        "transactional_by_key_one_key",
        {"rows": 2, "edited": True},
        [(seams.KEY_LOCKS, seams.part(seams.KEY_LOCKS).replace(seams.TRY_LOCK, "true"))],
        "2 rows of key 0 are in flight, of 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    name, setting, parts, said = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        for seam, value in parts:
            seams.replace(patch, seam, value)
        with staged(EVERY[name], **setting) as stage, pytest.raises(Violation, match=said):
            search(stage)


def search(stage: Stage) -> None:
    stage.explore(most=MOST)
    stage.sample(MOST, by=Priorities)
