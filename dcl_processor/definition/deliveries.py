"""Which options go with which delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidOption, Unsupported

from . import functions
from .kinds import rules_of
from .lease import Lease

if TYPE_CHECKING:
    from .definition import Definition


#: The options that only some deliveries use.
_OPTIONS = ("claim", "claimed_at", "lease")


def check(processor: Definition[Any]) -> None:
    """Refuse options that the delivery does not use, and require those that it needs."""
    label, rules = functions.label(processor), rules_of(processor)
    _refuse(processor, label, *(option for option in _OPTIONS if option not in rules.options))
    if "claim" in rules.options:
        _check_claim(processor, label)
    if "lease" in rules.options and not isinstance(processor.lease, Lease):
        raise InvalidOption(
            f"{label}: expected {_name(processor)} to have lease=Lease(…), which says when "
            f"another worker may take a row over, got {processor.lease!r}."
        )
    if processor._handles_batches and not rules.in_transaction:
        raise Unsupported(
            f"{label}: expected process_batch() with TRANSACTIONAL, whose transaction takes a "
            f"whole batch back, got it with {_name(processor)}; write process()."
        )


def _name(processor: Definition[Any]) -> str:
    return str(processor.delivery).upper()


def _refuse(processor: Definition[Any], label: str, *options: str) -> None:
    for option in options:
        if getattr(processor, option) is not None:
            raise InvalidOption(
                f"{label}: expected {option} only with another delivery than "
                f"{_name(processor)}, got {option}={getattr(processor, option)!r}; "
                "leave it out, or choose the delivery that it belongs to."
            )


def _check_claim(processor: Definition[Any], label: str) -> None:
    if processor.claim is not None:
        if processor.claim == processor.done:
            raise InvalidOption(
                f"{label}: expected claim to differ from done, so that a row in doubt differs "
                f"from a finished one, got {dict(processor.claim)!r} for both."
            )
        if all(callable(v) or hasattr(v, "resolve_expression") for v in processor.claim.values()):
            raise InvalidOption(
                f"{label}: expected claim to have at least one plain value, by which a claimed row "
                f"is recognised, got {dict(processor.claim)!r}; add claimed_at=… for the time, and "
                "a status or a flag to claim."
            )
        if processor.retry is not None and processor.reset is None:
            raise InvalidOption(
                f"{label}: expected reset=… to say what puts a claimed row back for its next "
                "attempt, got retry without it."
            )
        return
    if not processor._has_fixed_flip:
        raise InvalidOption(
            f"{label}: expected AT_MOST_ONCE without claim to have a plain done=…, which is "
            "written before the work, got a flip that depends on the handler; add claim=…."
        )
    for option in ("retry", "claimed_at"):
        if getattr(processor, option) is not None:
            raise InvalidOption(
                f"{label}: expected {option} together with claim=…, got AT_MOST_ONCE without "
                "claim, where a row counts as done before the work."
            )
