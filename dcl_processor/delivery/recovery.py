"""What becomes of a batch whose transaction was rolled back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor import log_fields
from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import is_contention, is_database_error, unwritable
from dcl_processor.errors import add_note
from dcl_processor.exceptions import (
    HandlerTimeout,
    ProcessorError,
    SessionLost,
    TransactionLost,
)
from dcl_processor.execution.handler import Failed, Handled, Outcome, as_exception
from dcl_processor.interrupts import ends_the_run
from dcl_processor.locking.claiming import Claimed, Miss, claim
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.wanted import Wanted
from dcl_processor.masking import described
from dcl_processor.settlement import writing
from dcl_processor.settlement.rehearsal import RowRefused

from .batch import Batch
from .lost_commit import is_committed_all_the_same

M = TypeVar("M", bound=Model)

logger = logging.getLogger("dcl_processor")

#: Seconds before each try to lock a row whose session this worker has closed: the server releases
#: the lock when it has rolled the transaction back.
WAITS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)


def recover(batch: Batch[M], raised: BaseException, *, session: Any, waited: bool = False) -> None:
    """Go on after an error that rolled back the transaction and all its writes.

    Does nothing if the transaction was committed all the same. With several rows it is unknown
    which of them caused the error, so each of them is redone in a batch of its own; a single row
    fails. ``session``: the driver's connection before the delivery; ``waited``: the COMMIT was sent
    with the next claim, in which the error may have come.

    Raises the error if

    - it ``ends_the_run()``,
    - it came after the claim was committed,
    - it came before any handler, and no row can be the cause: an error of the rehearsal, or of a
      claim that the database refused for another reason than contention.
    """
    if _is_settled(batch, raised, session=session, waited=waited):
        return
    is_committed = batch.marked is not None and batch.marked.is_committed
    is_early = isinstance(raised, ProcessorError) and not batch.started
    if is_committed:
        raise raised
    rolled_back, batch.outcomes = batch.outcomes, {}
    if ends_the_run(raised) or is_early:
        raise raised
    error = as_exception(raised)
    pks = batch.wanted.pks[: batch.wanted.limit]
    if _is_transient(batch, error, session, rolled_back):
        # A later pass asks again.
        batch.take(Claimed({}, dict.fromkeys(pks, Miss.ABSENT)))
        return
    # A claim may fail because of one row that cannot be loaded.
    ours = [*pks] if not batch.is_claimed else list(batch.rows)
    is_alone = len(ours) == 1 and (batch.is_claimed or len(batch.wanted.pks) == 1)
    if is_alone:
        batch.to_blame = ours[0]
    elif isinstance(error, TransactionLost):
        _tell_of_end(batch, ours)
    failed = batch.to_blame
    if failed is not None:
        outcome = rolled_back.get(failed)
        batch.outcomes[failed] = _failed(batch, failed, outcome, _explained(batch, error, session))
    # Race: poison row. Each row is redone alone, so that one fails and the others are done. A row
    # that is known to be at fault would fail again, so its handler is not called again.
    batch.to_redo = [pk for pk in ours if pk != failed]


def _is_settled(batch: Batch[Any], raised: BaseException, *, session: Any, waited: bool) -> bool:
    """Return whether the rows are flipped and committed."""
    if batch.marked is not None or len(batch.outcomes) < len(batch.rows):
        return False
    if not is_committed_all_the_same(batch, raised, session=session, waited=waited):
        return False
    # Race: work without flip. A handler that commits the transaction itself commits no flip.
    handled = [pk for pk, each in batch.outcomes.items() if isinstance(each, Handled)]
    return batch.processor.repeats or not batch.question.still_pending(handled).exists()


def _is_transient(
    batch: Batch[Any], error: Exception, session: Any, rolled_back: Mapping[Any, Outcome]
) -> bool:
    """Return whether to leave the rows to a later pass; raises errors that no row caused."""
    if not is_database_error(error):
        return False
    using = batch.question.using
    wrote_nothing = _wrote_nothing(batch)
    # A read-only InnoDB still grants locks, so each row's handler would be called before its
    # flip is refused. Elsewhere a handler may have made its own transaction read-only.
    if wrote_nothing or (rolled_back and connections[using].vendor == "mysql"):
        refused = unwritable(error, using)
        if refused is not None:
            raise refused from error
    if not wrote_nothing:
        return False
    is_transient = is_contention(error) or reconnected(using, since=session)
    if not is_transient and not batch.is_claimed:
        raise error
    return is_transient


def _wrote_nothing(batch: Batch[Any]) -> bool:
    """Return whether the error came in the claim or the rehearsal, so before any handler."""
    return not batch.is_claimed or not (batch.context.rehearsal or batch.started)


def _tell_of_end(batch: Batch[Any], ours: Sequence[Any]) -> None:
    """Log which rows are handled again; the work that was committed for them stays."""
    again = [str(pk) for pk in ours if pk in batch.started and pk != batch.to_blame]
    if again:
        name = batch.processor.name
        log_fields.log(
            logger,
            logging.WARNING,
            "%s: %s ended the transaction of its batch; these other rows are handled again, and "
            "work that was committed for them stays: %s%s.",
            name,
            "a handler" if batch.to_blame is None else f"the handler of row {batch.to_blame}",
            ", ".join(again[:5]),
            " and others" if len(again) > 5 else "",
            extra=log_fields.fields(name, pk=batch.to_blame, row_count=len(again)),
        )


def _failed(batch: Batch[M], pk: Any, failed: Outcome | None, error: Exception) -> Outcome:
    """Record a failure in a new transaction, because the row's own is lost.

    ``failed``: the outcome that was rolled back, if the handler had ended.
    """
    # Its lock is lost, so another worker may have begun the row before this.
    batch.add_to_failed(pk)
    if isinstance(error, RowRefused):
        # No handler was called, and no attempt is counted.
        return Failed(error.error, handled=True)
    if isinstance(failed, Failed):
        # The handler's own error explains more than that of the lost transaction.
        _add_loss(failed.error, error)
    elif failed is None or isinstance(failed, Handled):
        duration = failed.duration if isinstance(failed, Handled) else None
        failed = Failed(error, handled=True, duration=duration)
    if isinstance(failed, Failed):
        # The transaction with the row's notes is lost. They are written again below, if this worker
        # gets the lock again and the row is still pending.
        failed = replace(failed, attempt=None, again_in=None)
        if not _is_to_be_noted(batch, failed):
            return failed
    return _note(batch, pk, failed)


def _note(batch: Batch[M], pk: Any, failed: Outcome) -> Outcome:
    """Write what a failure writes, if this worker gets the row again; return its outcome."""
    try:
        is_timeout = isinstance(failed, Failed) and _is_timeout(failed.error)
        for pause in WAITS if is_timeout else WAITS[:1]:
            time.sleep(pause)
            again: Batch[M] = Batch(batch.context, batch.question, Wanted([pk]))
            with ReadCommitted(batch.question.using):
                # Race: double claim. Without the lock another worker may have finished the row.
                again.take(claim(again.question, again.wanted))
                if again.rows:
                    failed, values = again.notes(pk, failed)
                    writing.write(batch.question, [pk], values, batch.processor)
                    break
    except Exception as second:  # noqa: BLE001  # the first is the one to be reported
        name = batch.processor.name
        log_fields.log(
            logger,
            logging.WARNING,
            "%s: row %s failed, and no attempt was counted: %s",
            name,
            str(pk),
            second,
            extra=log_fields.fields(
                name, pk=pk, outcome="failed", **log_fields.error_fields(second)
            ),
        )
    return failed


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, HandlerTimeout)


def _add_loss(failure: Exception, error: Exception) -> None:
    """Note the lost transaction in the handler's error, unless the one follows from the other."""
    if not _is_timeout(failure):
        add_note(failure, f"Its transaction was lost, too: {described(error)}")


def _explained(batch: Batch[Any], error: Exception, session: Any) -> Exception:
    """Return ``SessionLost`` instead of the error if the statement's session is gone."""
    if is_database_error(error) and reconnected(batch.question.using, since=session):
        lost = SessionLost()
        lost.__cause__ = error
        return lost
    return error


def _is_to_be_noted(batch: Batch[Any], failed: Failed) -> bool:
    """Return whether to write values to a row whose transaction is lost.

    Without ``retry`` only a failure of the handler itself gives a row up.
    """
    if batch.processor.retry is not None:
        return True
    return batch.processor._notes_failures and not failed.handled
