"""What a run would do, without a handler."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from django.db.models import Q

from dcl_processor.engine.limits import refuse_backlog
from dcl_processor.engine.rows import Row
from dcl_processor.engine.run import Run
from dcl_processor.engine.verify import verify
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.report.dry_run import MOST_COUNTED, DryRun
from dcl_processor.sql.steps import Wanted

#: Rows that are shown, and tried until one is free.
SHOWN = 5


def dry_run(
    processor: Definition[Any], *, filter: Q | None, using: str | None, limit: int | None
) -> DryRun:
    """Return what the run would do; raise what it would raise before its first handler."""
    run = Run(
        processor,
        filter=filter,
        using=using,
        limit=limit,
        timeout=None,
        wait_for_locked=0,
        concurrency=1,
        stop=None,
    )
    run.prepare()
    try:
        return _looked(run)
    finally:
        run.leave()


def _looked(run: Run) -> DryRun:
    processor, question = run.processor, run.ask()
    found = DryRun(
        name=processor.name,
        pending=scan.count(replace(question, queryset=run.pending()), MOST_COUNTED),
        limit=run.limits.rows,
    )
    if processor.max_pending is not None and run.limits.rows is None:
        refuse_backlog(processor.name, question, processor.max_pending)
    pks = scan.whose_turn_it_is(question, ())
    first = tuple(islice(pks, min(SHOWN, SHOWN if found.limit is None else found.limit)))
    found = replace(found, due=scan.count(question, MOST_COUNTED), first=first)
    return _tried(run, question, pks[:SHOWN], found)


def _tried(run: Run, question: Any, pks: Any, found: DryRun) -> DryRun:
    """Try the flips on the first of the rows that is free; say what came of it."""
    for pk in pks:
        try:
            for row in run.session.claim(question, Wanted([pk], 1)).rows.values():
                refused = verify(run.processor, run.session, question, Row(pk, row))
                if refused is not None:
                    return replace(found, refused=str(refused))
                return found if run.processor._flip_needs_result else replace(found, rehearsed=pk)
        finally:
            run.session.rollback()
    return found
