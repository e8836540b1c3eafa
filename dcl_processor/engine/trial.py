"""What a run would do: a value, as the report is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from dcl_processor.engine.limits import refuse_backlog
from dcl_processor.engine.rows import Row
from dcl_processor.engine.run import Run
from dcl_processor.engine.verify import verify
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.errors import printable
from dcl_processor.report.report import MOST_COUNTED, counted, plain
from dcl_processor.sql.steps import Wanted

#: Rows that are shown, and tried until one is free.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do.

    ``pending``: pending rows; ``due``: those of them that a run may try now. Both are counted up to
    10,000, and 10,001 means that there are more. ``limit``: that of the run. ``first``: the primary
    keys of the first 5 rows that the run would try, in its order. ``rehearsed``: the row on which
    the flip was tried and rolled back; ``None``: no row was free, or the flip is not known before
    the handler has returned. ``refused``: why the flip of that row was refused; a handler may
    change that.
    """

    name: str
    pending: int = 0
    due: int = 0
    limit: int | None = None
    first: Sequence[Any] = ()
    rehearsed: Any = None
    refused: str = ""

    @property
    def rows(self) -> int:
        """The number of rows that the run would try; 10,001 means that there are more."""
        return self.due if self.limit is None else min(self.due, self.limit)

    def as_dict(self) -> dict[str, Any]:
        """Return the dry run as plain values that ``json.dumps()`` accepts.

        Counts end at 10,000; ``capped`` is true if there are more pending rows.
        """
        numbers = {name: getattr(self, name) for name in ("pending", "due", "rows")}
        return {
            "name": self.name,
            "dry_run": True,
            **{name: min(number, MOST_COUNTED) for name, number in numbers.items()},
            "capped": self.pending > MOST_COUNTED,
            "limit": self.limit,
            "first": [plain(pk) for pk in self.first],
            "rehearsed": plain(self.rehearsed),
            "refused": self.refused,
        }

    def __str__(self) -> str:
        """Return the dry run in one line."""
        if not self.pending:
            return f"{self.name}: dry run: nothing pending"
        rows = f"{counted(self.rows)} of {counted(self.pending)} pending rows"
        first = f", first {', '.join(printable(str(pk)) for pk in self.first)}" * bool(self.first)
        flip = self.refused.removeprefix(f"{self.name}: ") or "no flip was tried"
        if self.rehearsed is not None:
            flip = f"the flip takes row {printable(str(self.rehearsed))} out of pending"
        return f"{self.name}: dry run: would try {rows}{first}; {flip}"


def dry_run(
    processor: Definition[Any], *, filter: Q | None, using: str | None, limit: int | None
) -> DryRun:
    """Return what the run would do; raise what it would raise before its first handler."""
    run = Run(processor, filter=filter, using=using, limit=limit, concurrency=1)
    run.prepare()
    try:
        question = run.ask()
        all_rows = ask(processor.pending, label="", filter=filter, using=question.using)
        if processor.max_pending is not None and limit is None:
            refuse_backlog(processor.name, question, processor.max_pending)
        pks = scan.first_window(question)
        rehearsed, refused = _tried(run, question, pks[:SHOWN])
        return DryRun(
            processor.name,
            pending=scan.count(all_rows, MOST_COUNTED),
            due=scan.count(question, MOST_COUNTED),
            limit=limit,
            first=tuple(pks[: SHOWN if limit is None else min(SHOWN, limit)]),
            rehearsed=rehearsed,
            refused=refused,
        )
    finally:
        run.leave()


def _tried(run: Run, question: Question[Any], pks: Sequence[Any]) -> tuple[Any, str]:
    """Try the flips on the first of the rows that is free; return its key, or why not."""
    for pk in pks:
        try:
            for row in run.session.claim(question, Wanted([pk], 1)).rows.values():
                refused = verify(run.processor, run.session, question, Row(pk, row))
                is_tried = refused is None and not run.processor._flip_needs_result
                return (pk if is_tried else None), str(refused or "")
        finally:
            run.session.rollback()
    return None, ""
