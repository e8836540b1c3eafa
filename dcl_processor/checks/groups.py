"""Checks of ``group_by`` and ``in_order``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage

from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import groups_of
from dcl_processor.exceptions import InvalidOption, InvalidPending, Unsupported
from dcl_processor.locking.key_lock import refuse_database
from dcl_processor.processor import BatchProcessor


def check(processor: BatchProcessor[Any], question: Question[Any]) -> Iterator[CheckMessage]:
    """Yield what keeps the processor's keys from working, or may stop one of them for good."""
    if processor.group_by is None:
        return
    try:
        groups_of(processor, question.model)
    except InvalidOption as error:
        yield checks.Error(
            _sentence(processor, error),
            hint="The key is a column of the model, or a forward relation.",
            obj=processor.name,
            id="dcl_processor.E015",
        )
    try:
        refuse_database(question, processor.name)
    except Unsupported as error:
        yield checks.Error(
            _sentence(processor, error),
            hint="Leave group_by out, and run one worker; or use PostgreSQL.",
            obj=processor.name,
            id="dcl_processor.E016",
        )
    if not processor.in_order:
        return
    try:
        refuse_order(question, processor.name)
    except InvalidPending as error:
        yield checks.Error(
            _sentence(processor, error),
            hint="An order by other tables may change while a row of the key is handled.",
            obj=processor.name,
            id="dcl_processor.E017",
        )
    has_dead_letter = processor.failed is not None or _writes_dead_letter(processor)
    if processor.retry is None or not has_dead_letter:
        yield checks.Warning(
            "in_order without retry and failed: a row that always fails stops its key for good, "
            "because no row behind it is handled.",
            hint="Set retry=Retry(…) and failed={…}, which takes a row that is given up on out of "
            "pending.",
            obj=processor.name,
            id="dcl_processor.W006",
        )


def _writes_dead_letter(processor: BatchProcessor[Any]) -> bool:
    return getattr(processor.get_failed, "__func__", None) is not BatchProcessor.get_failed


def _sentence(processor: BatchProcessor[Any], error: Exception) -> str:
    return str(error).removeprefix(f"{processor.name}: ")
