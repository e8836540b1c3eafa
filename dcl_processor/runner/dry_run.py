"""The dry run: what a run would do, without a call of a handler, and without a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from django.db import transaction

from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.wanted import Wanted
from dcl_processor.report import MOST_COUNTED, DryRun
from dcl_processor.settlement.rehearsal import RowRefused, rehearse

from .run import Run

#: Rows of which the primary keys are shown, and one of which is to be free for the rehearsal.
SHOWN = 5


def dry_run(run: Run[Any]) -> DryRun:
    """Return what the run would do; raise what it would raise before its first handler."""
    try:
        question = run.checked()
        # Which refuses what cannot be a key.
        groups = None if run.processor.group_by is None else run.group_passes(question)
        pending = scan.count(question, MOST_COUNTED)
        found = DryRun(name=run.processor.name, pending=pending, limit=run.limits.rows)
        in_order = run.processor.strict_order
        windows = scan.ordered_scan(run.ask, set()) if in_order else scan.KeyScan(run.ask, set())
        window = next(iter(windows), None)
        if window is None:
            return found
        question, waiting = window
        run.refuse_backlog(question, waiting)
        if groups is not None:
            groups.refuse_spellings(question)
        return replace(
            found,
            due=scan.count(question, MOST_COUNTED),
            first=tuple(islice(waiting, run.limits.clip(SHOWN, 0))),
            rehearsed=_rehearsed(run, question, list(islice(waiting, SHOWN))),
        )
    finally:
        run.leave()


def _rehearsed(run: Run[Any], question: Question[Any], pks: Sequence[Any]) -> Any:
    """Try the flips on the first of the rows that is free; return its key if its flip is known."""
    processor = run.processor
    with ReadCommitted(question.using):
        for pk in pks:
            for row in claim(question, Wanted([pk])).rows.values():
                try:
                    rehearse(processor, question, row, pk)
                except RowRefused as refused:
                    raise refused.error from refused
                transaction.set_rollback(True, using=question.using)
                return None if processor._flip_needs_result or processor.repeats else pk
    return None
