"""How many rows are pending: a number for people, which may be out of date when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Model, Q

from dcl_processor.engine import limits
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.dry_run import MOST_COUNTED

#: The most rows that are counted.
MOST = MOST_COUNTED


def count(processor: Definition[Any], *, using: str | None = None, most: int = MOST) -> int:
    """Return the number of pending rows without a lock; ``most`` + 1 means that there are more."""
    return scan.count(question_of(processor, using), most)


def question_of(
    processor: Definition[Any],
    using: str | None,
    due: Callable[[type[Model]], Q | None] | None = None,
) -> Question[Any]:
    """Return the processor's question, as ``run()`` would ask it; raises the same errors.

    ``due``: the condition for a row that may be tried now, as for ``ask()``; without it, all
    pending rows are in question.
    """
    alias = using or processor.using
    limits.check_alias(alias)
    return ask(processor.pending, label=processor.name, using=alias, due=due)
