"""Checks of ``group_by`` and ``in_order``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.db import DatabaseError

from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import groups_of
from dcl_processor.exceptions import InvalidOption, InvalidPending, Unsupported
from dcl_processor.locking.key_lock import refuse_database, refuse_without_skip_locked
from dcl_processor.processor import BatchProcessor

from . import indexes
from .questions import refused


def check(
    processor: BatchProcessor[Any], question: Question[Any], *, ask: bool
) -> Iterator[CheckMessage]:
    """Yield what keeps the processor's keys from working, or may stop one of them for good.

    Connects to the database only if ``ask``.
    """
    if processor.group_by is None:
        return
    is_refused = False
    for refuse, code, hint in (
        (
            lambda: groups_of(processor, question.model),
            "dcl_processor.E015",
            "The key is a column of the model, or a forward relation.",
        ),
        (
            lambda: _refuse_database(processor, question, ask=ask),
            "dcl_processor.E016",
            "Set lock_related where the key is a foreign key, or leave group_by out.",
        ),
        (
            lambda: refuse_order(question, processor.name) if processor.in_order else None,
            "dcl_processor.E017",
            "An order by other tables may change while a row of the key is handled.",
        ),
    ):
        try:
            refuse()
        except (InvalidOption, InvalidPending, Unsupported) as error:
            is_refused = True
            yield refused(processor, error, hint, code)
    if not is_refused:
        yield from indexes.check(processor, question, groups_of(processor, question.model))
    if not processor.in_order:
        return
    if processor.retry is None or not processor._has_dead_letter:
        yield checks.Warning(
            "in_order without retry and failed: a row that always fails stops its key for good, "
            "because no row behind it is handled.",
            hint="Set retry=Retry(…) and failed={…}, which takes a row that is given up on out of "
            "pending.",
            obj=processor.name,
            id="dcl_processor.W006",
        )


def _refuse_database(processor: BatchProcessor[Any], question: Question[Any], *, ask: bool) -> None:
    refuse_database(question, processor.name, related=processor.lock_related)
    if ask and processor.lock_related:
        # A database that does not answer is not for this check to report.
        with suppress(DatabaseError):
            refuse_without_skip_locked(question.using, processor.name)
