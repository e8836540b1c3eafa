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


#: The subject, its setting, and what is replaced by what.
FAULTS: dict[str, tuple[str, dict[str, Any], list[tuple[seams.Seam, Any]]]] = {
    "no lock": ("transactional", {}, [(seams.LOCK, "")]),
    "one look, of work in the transaction": (
        "transactional_spanning",
        {},
        [(seams.IS_OWN_TABLE, lambda _: True)],
    ),
    "one look, of claims": ("claim_spanning", {}, [(seams.IS_OWN_TABLE, lambda _: True)]),
    "one look, of leases": ("lease_spanning", {}, [(seams.IS_OWN_TABLE, lambda _: True)]),
    "a settlement without its mark": (
        "lease",
        {"lapse": True},
        [(seams.WRITING, without_its_mark)],
    ),
    "a flip in another transaction": (
        "transactional_ending",
        {},
        [(seams.WRITTEN, in_any_transaction), (seams.RELEASE, seams.NOTHING)],
    ),
    "a flip before the work": ("transactional", {}, [(seams.CLAIM, claim_and_flip)]),
    "a renewal of any row": ("lease", {"hearts": 1}, [(seams.RENEWAL, of_any_row)]),
    "no lock of the key": (
        "transactional_by_key_one_key",
        {"rows": 2, "edited": True},
        [(seams.KEY_LOCKS, seams.part(seams.KEY_LOCKS).replace(seams.TRY_LOCK, "true"))],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    name, setting, parts = FAULTS[fault]
    with staged(EVERY[name], **setting) as stage, pytest.MonkeyPatch.context() as patch:
        for seam, value in parts:
            seams.replace(patch, seam, value)
        with pytest.raises(Violation):
            search(stage)


def search(stage: Stage) -> None:
    stage.explore(most=MOST)
    stage.sample(MOST, by=Priorities)
