"""Every error that dcl_processor raises, under one root."""

from __future__ import annotations

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
    "OutsideTransaction",
    "ProcessorError",
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
