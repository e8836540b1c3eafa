"""What is written to a row that was handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

Values = Mapping[str, Any]


def flip(processor: Definition[Any], row: Any, result: Any) -> Values:
    """Return the values that take a handled row out of pending."""
    return with_cleared_retry(processor, processor.get_done(row, result))


def flips(
    processor: Definition[Any], rows: Mapping[Any, Any], results: Mapping[Any, Any]
) -> dict[Any, Values]:
    """Return the flips of handled rows by key; a fixed flip is one object for all of them."""
    if processor._has_fixed_flip:
        return dict.fromkeys(results, with_cleared_retry(processor, processor.done or {}))
    return {pk: flip(processor, rows[pk], result) for pk, result in results.items()}


def with_cleared_retry(processor: Definition[Any], values: Values) -> Values:
    """Add what the retry columns of a row that never failed contain.

    A row may become pending again. Failures and claims from before its success would then use up
    its attempts. The user's own values for these columns win.
    """
    return values if processor.retry is None else {**processor.retry.fresh(), **values}
