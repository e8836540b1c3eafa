"""Checks of ``group_by``, ``in_order`` and ``max_per_group`` that need no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidOption, Unsupported

from .kinds import rules_of

if TYPE_CHECKING:
    from .definition import Definition


def check(processor: Definition[Any]) -> None:
    """Refuse options of groups that cannot work together."""
    if processor.group_by is None:
        for option in ("in_order", "max_per_group", "lock_related"):
            if getattr(processor, option):
                raise InvalidOption(
                    f"{processor._label}: expected {option} together with group_by=…, got "
                    f"{option}={getattr(processor, option)!r} alone; name the column of the key in "
                    "group_by."
                )
        return
    for sentence in _contradictions(processor):
        raise Unsupported(f"{processor._label}: expected {sentence}.")
    rules = rules_of(processor)
    without_mark = processor.claim is None or processor.claimed_at is None
    if "claim" in rules.options and processor.lease is None and without_mark:
        raise InvalidOption(
            f"{processor._label}: expected claim=… and claimed_at=… with group_by and "
            f"{str(processor.delivery).upper()}, got a processor without both; add them, because "
            "nothing else shows that a row of the key is in flight."
        )


def _contradictions(processor: Definition[Any]) -> Iterator[str]:
    """Yield what is wrong with options that are right alone, but not together."""
    most = processor.max_per_group or 1
    if processor.strict_order:
        yield (
            "group_by or strict_order, got both: keys take turns, so there is no order over all "
            "rows; use in_order=True for the order within each key"
        )
    if processor._handles_batches and most > 1:
        yield (
            f"max_per_group=1 or None with process_batch(), which gets the rows of a key together, "
            f"got {most}; leave max_per_group out"
        )
    if processor.lock_related and rules_of(processor).in_transaction:
        yield (
            "AT_MOST_ONCE or AT_LEAST_ONCE with lock_related, whose claims are short, got "
            f"{str(processor.delivery).upper()}, in which every session that writes the related "
            "row would wait for the handler; choose another delivery, or leave lock_related out"
        )
    if processor.in_order:
        yield from _contradictions_in_order(processor, most)


def _contradictions_in_order(processor: Definition[Any], most: int) -> Iterator[str]:
    if most > 1:
        yield (
            f"max_per_group=1 or None with in_order, which handles one row of a key at a time, got "
            f"{most}; leave one of the two out"
        )
    if processor.batch_size > 1 or processor._handles_batches:
        got = "process_batch()" if processor._handles_batches else processor.batch_size
        yield (
            f"process() and batch_size=1 with in_order, where a row that fails has to stop the "
            f"rows behind it, got {got}; leave one of the two out"
        )
    if processor.repeats:
        yield (
            "in_order or repeats, got both: a row that stays pending would be at the head of its "
            "key forever; leave one of the two out"
        )
