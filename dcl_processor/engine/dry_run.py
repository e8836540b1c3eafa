"""The dry run: what a run would do, without a call of a handler, and without a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import groups_of
from dcl_processor.locking.key_lock import refuse_collation
from dcl_processor.report import MOST_COUNTED, DryRun
from dcl_processor.settlement.rehearsal import RowRefused, rehearse

from .claim import claim
from .run import Run
from .session import Session
from .settlement import Wanted

#: Rows of which the primary keys are shown, and one of which is to be free for the rehearsal.
SHOWN = 5


def dry_run(run: Run) -> DryRun:
    """Return what the run would do; raise what it would raise before its first handler."""
    processor = run.processor
    try:
        question = run.checked()
        run.make_source(question)  # which refuses what cannot be a key
        pending = scan.count(question, MOST_COUNTED)
        found = DryRun(name=processor.name, pending=pending, limit=run.limits.rows)
        in_order = processor.strict_order
        windows = scan.ordered_scan(run.ask, set()) if in_order else scan.KeyScan(run.ask, set())
        window = next(iter(windows), None)
        if window is None:
            return found
        question, waiting = window
        run.refuse_backlog(question, waiting)
        if processor.group_by is not None:
            refuse_collation(question, groups_of(processor, question.model), processor.name)
        return replace(
            found,
            due=scan.count(question, MOST_COUNTED),
            first=tuple(islice(waiting, run.limits.clip(SHOWN, 0))),
            rehearsed=_rehearsed(run, question, list(islice(waiting, SHOWN))),
        )
    finally:
        run.leave()


def _rehearsed(run: Run, question: Question[Any], pks: Sequence[Any]) -> Any:
    """Try the flips on the first of the rows that is free; return its key if its flip is known."""
    processor, session = run.processor, Session(question.using, run.processor.name)
    error: Exception | None = None
    for pk in pks:
        try:
            for held in claim(session, question, Wanted([pk]), None).rows:
                rehearse(processor, question, held.row, pk)
                return None if processor._flip_needs_result or processor.repeats else pk
        except RowRefused as refused:
            error = error or refused.error
        finally:
            session.rollback()
    if error is not None:
        raise error
    return None
