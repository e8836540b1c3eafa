"""Every error that dcl_processor raises, under one root."""

from __future__ import annotations

from typing import Any, Literal

from django.core.signing import BadSignature

from dcl_processor.report.exceptions import (
    AttemptsUsedUp,
    HandlerExited,
    HandlerTimeout,
    InsideTransaction,
    InvalidDone,
    InvalidOption,
    InvalidPending,
    OutsideTransaction,
    ProcessorError,
    RowsFailed,
    SessionLost,
    StillPending,
    TooManyPending,
    TransactionLeftOpen,
    TransactionLost,
    Unsupported,
)

__all__ = [
    "AttemptsUsedUp",
    "HandlerExited",
    "HandlerTimeout",
    "InsideTransaction",
    "InvalidDone",
    "InvalidOption",
    "InvalidPending",
    "InvalidToken",
    "OutsideTransaction",
    "ProcessorError",
    "ReservationLost",
    "RowsFailed",
    "SessionLost",
    "StillPending",
    "TooManyPending",
    "TransactionLeftOpen",
    "TransactionLost",
    "UnknownProcessor",
    "Unsupported",
]


class UnknownProcessor(ProcessorError, LookupError):
    """No installed app has a processor of that name."""


#: Why a reservation no longer holds its row.
LostBecause = Literal["settled", "taken_over", "lapsed", "gone"]

_LOST: dict[LostBecause, str] = {
    "settled": "one that is no longer pending, because it was settled",
    "taken_over": "one that another worker has taken over",
    "lapsed": "one that is pending again, because it was put back",
    "gone": "none, because it was deleted",
}


class ReservationLost(ProcessorError):
    """A reservation no longer holds its row, so that nothing was written; ``reason`` says why.

    ``"settled"``: the row is no longer pending, for instance because the same call was sent twice.
    ``"taken_over"``: another worker has it. ``"lapsed"``: it is pending again, and no worker has
    it: it was released, snoozed, failed or requeued. ``"gone"``: it was deleted.
    """

    def __init__(self, name: str, pk: Any, reason: LostBecause) -> None:
        super().__init__(
            f"{name}: expected a reservation that holds row {pk}, got {_LOST[reason]}; reserve "
            "another row."
        )
        self.reason: LostBecause = reason


class InvalidToken(ProcessorError, BadSignature):
    """A reservation's token is not one that this processor gave out, to the same ``bound_to``."""
