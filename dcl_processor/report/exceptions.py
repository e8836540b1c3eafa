"""Every error that dcl_processor raises, under one root."""

from __future__ import annotations

import copyreg
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dcl_processor.report.errors import represent, shown


class ProcessorError(Exception):
    """The root of every error raised by dcl_processor."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Past __init__(), which makes the sentence from other arguments than the exception keeps.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class InvalidOption(ProcessorError, ImproperlyConfigured):
    """An option, or a parameter of ``run()``, is unknown or has an unusable value."""


class InvalidPending(ProcessorError, ImproperlyConfigured):
    """``pending`` is not a queryset whose rows can be locked and checked one by one."""


class InvalidDone(ProcessorError, ImproperlyConfigured):
    """``done`` cannot be written to the model."""


class StillPending(ProcessorError, ImproperlyConfigured):
    """A row would be pending again after it was handled: it would be handled forever.

    ``pk``: the key of that row, if it is known.
    """

    pk: Any = None


class InsideTransaction(ProcessorError):
    """A run was started inside ``transaction.atomic()``, where no row can be committed."""


class OutsideTransaction(ProcessorError):
    """``lock_key()`` was called outside ``transaction.atomic()``, where no lock would stay."""


class TooManyPending(ProcessorError):
    """More rows wait than ``max_pending``, and the run has no ``limit``; no row was handled."""


class TransactionLost(ProcessorError):
    """The transaction that held the rows' locks ended before the flip, which is not written."""

    sentence = (
        "expected the transaction that locked the row to be open until its flip, got one that "
        "ended earlier; remove COMMIT, ROLLBACK, DDL, connection.close() and "
        "close_old_connections() from the handler, and do not catch a deadlock in it."
    )

    def __init__(self) -> None:
        super().__init__(self.sentence)


class SessionLost(TransactionLost):
    """The server or the network ended the session that held the rows' locks; no row is flipped."""

    sentence = (
        "expected the database session that locked the row to last until its flip, got one that "
        "the server or the network ended earlier; raise the timeouts that are shorter than the "
        "handler's work (wait_timeout, idle_transaction_timeout, "
        "idle_in_transaction_session_timeout), or use Delivery.AT_LEAST_ONCE for slow work."
    )


class TransactionLeftOpen(ProcessorError):
    """A handler that was called outside any transaction began one, and did not end it.

    ``shared``: it was an asynchronous one, perhaps another one than this row's.
    """

    def __init__(self, *, shared: bool = False) -> None:
        beside = ", or another one beside it on the event loop," if shared else ""
        super().__init__(
            f"expected the handler to leave no transaction open, got one that it{beside} began and "
            "did not end, which was rolled back; use transaction.atomic(), or commit it."
        )


class Unsupported(ProcessorError, ImproperlyConfigured):
    """This database, delivery or version does not support what was asked for."""


class RowsFailed(ProcessorError):
    """Some rows of a run failed, or none could be tried; the report is in ``report``."""

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class HandlerExited(ProcessorError):
    """A handler raised an error that is no ``Exception``, such as ``SystemExit``: its row failed.

    The ``__cause__`` is that error.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            "expected the handler to return or to raise an Exception, got "
            f"{shown(represent(error))}"
        )


class HandlerTimeout(ProcessorError):
    """The handler was interrupted at its ``handler_timeout``.

    ``seconds`` is that limit, and the ``__cause__`` shows where the handler was.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"expected the handler to return within handler_timeout={seconds:g} seconds, got none; "
            "set a shorter timeout for what it waits for, or a longer handler_timeout."
        )


class AttemptsUsedUp(ProcessorError):
    """A row has used up its attempts, and was not given up on by the last of them."""

    def __init__(self, attempts: int) -> None:
        super().__init__(
            f"all {attempts} attempts were used up, and the row was not given up on: in the last "
            "one its process died or lost the lease, or failed was not written"
        )


# A traceback names an error by the module from which users import it.
for _each in [*vars().values()]:
    if isinstance(_each, type) and issubclass(_each, ProcessorError):
        _each.__module__ = "dcl_processor.exceptions"
