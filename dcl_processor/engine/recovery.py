"""What becomes of rows whose message failed, or whose transaction was rolled back."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.db.models.base import ModelState

from dcl_processor import log_fields
from dcl_processor import steady as time
from dcl_processor.candidates.question import Question
from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import (
    is_about_rows,
    is_contention,
    is_database_error,
    is_out_of_resources,
    is_stale_plan,
    unwritable,
)
from dcl_processor.errors import add_note
from dcl_processor.exceptions import (
    HandlerTimeout,
    ProcessorError,
    SessionLost,
    TransactionLost,
    Unsupported,
)
from dcl_processor.execution.handler import Failed, Handled, Outcome, as_exception
from dcl_processor.interrupts import ends_the_run
from dcl_processor.masking import described
from dcl_processor.settlement import writing
from dcl_processor.settlement.rehearsal import RowRefused

from . import flips, settling, work
from .claim import claim, statements
from .key_claim import take_turn
from .settlement import COMMIT, Batch, Claimed, Held, NotSettled, Settlement, Statement, Wanted

if TYPE_CHECKING:
    from .lane import Lane

logger = logging.getLogger("dcl_processor")
operations = logging.getLogger("dcl_processor.operations")

#: Seconds before each try to lock a row whose session this worker has closed: the server releases
#: the lock when it has rolled the transaction back.
WAITS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)


def settle_alone(lane: Lane, after: Settlement, error: BaseException) -> None:
    """Find out what became of a settlement whose message failed, and settle what it did not."""
    session, batch = lane.session, after.batch
    if not batch.rows and not ends_the_run(error):
        # Its claim got no row, so that none can have failed.
        session.rollback()
        lane.count(after)
        return
    raised = writing.explained(error, lane.processor, [held.pk for held in batch.rows])
    if raised is not error:
        raised.__cause__ = error
    recover(lane, batch, raised, waited=True)


def recover(lane: Lane, batch: Batch, raised: BaseException, *, waited: bool = False) -> None:
    """Go on after an error that rolled back the batch's transaction and all its writes.

    Counts the rows if the transaction was committed all the same. With several rows it is unknown
    which of them caused the error, so each of them is redone in a batch of its own; a single row
    fails. ``waited``: the COMMIT was sent.

    Raises the error if it ``ends_the_run()``, or if it came before any handler and no row can be
    the cause.
    """
    lane.session.rollback()
    # The rows have, or may have, a mark that no rollback removes.
    if batch.mark is not None and (batch.is_marked or ends_the_run(raised)):
        lane.clear_up(batch)
        raise raised
    if _is_settled(lane, batch, raised, waited=waited):
        lane.source.end(batch)
        if ends_the_run(raised):
            raise raised
        return
    is_early = isinstance(raised, ProcessorError) and not batch.started
    if ends_the_run(raised) or is_early:
        raise raised
    _redo(lane, batch, as_exception(raised))


def _redo(lane: Lane, batch: Batch, error: Exception) -> None:
    """Let the row fail that is to blame, and the others be handled again."""
    # A claim may fail because of one row that cannot be loaded.
    ours = [held.pk for held in batch.rows] or [*batch.wanted.pks[: batch.wanted.limit]]
    # Without row locks, another session has all of them.
    has_row_locks = lane.session.connection.features.has_select_for_update
    is_of_all = len(ours) == 1 or (is_contention(error) and not has_row_locks)
    if _is_transient(lane, batch, error) and is_of_all:
        lane.source.give_back(batch, missed=True)  # a later pass asks again
        return
    failed, others = batch.to_blame, list[tuple[Held, None]]()
    if len(ours) == 1 and (batch.claimed is not None or len(batch.wanted.pks) == 1):
        failed = batch.rows[0] if batch.rows else Held(ours[0], None)
    elif _is_of_first(batch, error):
        failed, *rest = batch.rows
        others = [(held, None) for held in rest]
    else:
        _tell_of_redone(lane, batch, failed, error)
    if failed is None:
        batch.ended = []
    else:
        known = {held.pk: outcome for held, outcome in batch.ended}.get(failed.pk)
        outcome = _failed(lane, batch, failed, known, _explained(batch, error))
        batch.ended = [(failed, outcome), *others]
    # Race: poison row. Each row is redone alone, so that one fails and the others are done. A row
    # that is known to be at fault would fail again, so its handler is not called again.
    waiting = {failed and failed.pk, *[held.pk for held, _ in others]}
    redone = [pk for pk in ours if pk not in waiting]
    lane.source.end(batch, redone=redone)


def _is_of_first(batch: Batch, error: Exception) -> bool:
    """Return whether the others were not to start before the first row's flip was written."""
    is_alone = len(batch.started) == 1 and len(batch.ended) == len(batch.rows)
    return isinstance(error, RowRefused) or (is_alone and batch.started[0] is batch.rows[0])


def _is_settled(lane: Lane, batch: Batch, raised: BaseException, *, waited: bool) -> bool:
    """Return whether the rows are flipped and committed."""
    claimed = batch.claimed
    if claimed is None or len(batch.ended) < len(claimed.rows) or not claimed.rows:
        return False
    if isinstance(raised, ProcessorError) or batch.mark is not None:
        return False
    is_lost = is_database_error(raised) and reconnected(lane.session.using, since=claimed.driver)
    if not (waited or is_lost) or not lane.session.was_committed(claimed.transaction_id):
        return False
    # Race: work without flip. A handler that commits the transaction itself commits no flip.
    handled = [held.pk for held, each in batch.ended if isinstance(each, Handled)]
    return not batch.question.still_pending(handled).exists()


def _is_transient(lane: Lane, batch: Batch, error: Exception) -> bool:
    """Return whether to leave the rows to a later pass; raises errors that no row caused."""
    if not is_database_error(error):
        return False
    if is_out_of_resources(error) and not batch.started and not lane.may_go_on():
        raise error
    wrote_nothing = batch.claimed is None or not (lane.run.rehearsal is not None or batch.started)
    # A read-only InnoDB still grants locks, so each row's handler would be called before its flip
    # is refused. Elsewhere a handler may have made its own transaction read-only.
    is_mysql = lane.session.connection.vendor == "mysql"
    if wrote_nothing or (batch.ended and is_mysql):
        refused = unwritable(error, batch.question.using)
        if refused is not None:
            raise refused from error
    if not wrote_nothing:
        return False
    if _passes(lane, batch, error):
        return True
    # Whatever the database answers to one row is that row's failure.
    if batch.claimed is None and not (is_about_rows(error) or is_out_of_resources(error)):
        _refuse_for_all(lane, batch, error)
    return False


def _passes(lane: Lane, batch: Batch, error: Exception) -> bool:
    """Return whether the database may answer a later claim of the same rows otherwise."""
    if is_stale_plan(error):
        # Outside a transaction no ROLLBACK has let the driver forget it.
        lane.session.execute(Statement("DEALLOCATE ALL"))
        return True
    since = batch.claimed.driver if batch.claimed is not None else lane.driver
    # A rehearsal is to cost no row anything.
    is_rehearsal = batch.claimed is not None and is_out_of_resources(error)
    return is_rehearsal or is_contention(error) or reconnected(batch.question.using, since=since)


def _refuse_for_all(lane: Lane, batch: Batch, error: Exception) -> None:
    """Raise the error of a claim, unless one of its instances is what could not be made."""
    question, wanted = batch.question, batch.wanted
    try:
        if wanted.keys:
            take_turn(lane.session, question, wanted)
            lane.session.rollback()
        _lock_bare(lane, question, wanted.pks[0])
    except Exception:  # noqa: BLE001  # the first is the one to be reported
        raise error from None
    finally:
        lane.session.rollback()
    if len(wanted.pks) > 1:
        name, extra = lane.processor.name, log_fields.fields(lane.processor.name)
        message = "%s: a claim of several rows failed, so that each is claimed alone: %s"
        log_fields.log(logger, logging.WARNING, message, name, described(error), extra=extra)


def _lock_bare(lane: Lane, question: Question[Any], pk: Any) -> Claimed:
    """Lock a row and check it again, by the statements of a claim, and make no instance of it."""
    connection = lane.session.connection
    answers = lane.session.begin(statements(question, Wanted([pk])))
    # The one lock of a database without row locks returns no row.
    is_ours = all(answers if connection.features.has_select_for_update else answers[-1:])
    rows = [Held(pk, _bare(question, pk))] if is_ours else []
    return Claimed(rows, driver=connection.connection)


def _bare(question: Question[Any], pk: Any) -> Any:
    """Return an instance with all fields but its key deferred, past code of the user's."""
    row = object.__new__(question.model)
    row._state = ModelState()
    row._state.db, row._state.adding = question.using, False
    fields = question.model._meta.pk_fields
    keys = [f.attname for f in fields]
    vars(row).update(zip(keys, pk if len(keys) > 1 else [pk], strict=True))
    return row


def _tell_of_redone(lane: Lane, batch: Batch, failed: Held | None, error: Exception) -> None:
    """Count and log the rows that are handled again."""
    again = [str(held.pk) for held in batch.started if held is not failed]
    if not again:
        return
    lane.run.counters.counts["redone"] += len(again)
    name, these = lane.processor.name, ", ".join(again[:5]) + " and others" * (len(again) > 5)
    message = "%s: the work for a batch was rolled back; these rows are handled again: %s: %s"
    arguments: tuple[object, ...] = name, these, described(error)
    if isinstance(error, TransactionLost):
        # What was committed for them stays.
        message = (
            "%s: %s ended the transaction of its batch; these other rows are handled again, and "
            "work that was committed for them stays: %s."
        )
        whose = "a handler" if failed is None else f"the handler of row {failed.pk}"
        arguments = name, whose, these
    extra = log_fields.fields(name, pk=failed and failed.pk, row_count=len(again))
    log_redone(error, message, *arguments, extra=extra)


def log_redone(error: Exception, message: str, *arguments: object, extra: dict[str, Any]) -> None:
    """Log that rows are handled again, because of this error."""
    if isinstance(error, Unsupported):
        # What process_batch() returns is wrong in each run, and only new code changes that.
        log_fields.log(operations, logging.ERROR, message, *arguments, extra=extra)
    else:
        log_fields.log(logger, logging.WARNING, message, *arguments, extra=extra)


def _explained(batch: Batch, error: Exception) -> Exception:
    """Return ``SessionLost`` instead of the error if the statement's session is gone."""
    since = batch.claimed.driver if batch.claimed is not None else None
    if is_database_error(error) and reconnected(batch.question.using, since=since):
        lost = SessionLost()
        lost.__cause__ = error
        return lost
    return error


def _failed(
    lane: Lane, batch: Batch, held: Held, known: Outcome | None, error: Exception
) -> Outcome:
    """Record a failure in a new transaction, because the row's own is lost.

    ``known``: the outcome that was rolled back, if the handler had ended.
    """
    if isinstance(error, RowRefused):
        return settling.not_flipped(None, error.error)
    if known is None and held not in batch.started:
        return Failed(error, unstarted=True)
    failed: Outcome
    if isinstance(known, Failed):
        # The handler's own error explains more than that of the lost transaction.
        if not isinstance(known.error, HandlerTimeout) and known.error is not error:
            add_note(known.error, f"Its transaction was lost, too: {described(error)}")
        failed = known
    elif known is None or isinstance(known, Handled):
        failed = settling.not_flipped(known, error)
    else:
        failed = known
    # The transaction with the row's notes is lost. They are written again below, if this worker
    # gets the lock again and the row is still pending.
    failed = _unnoted(failed)
    if isinstance(failed, Failed) and not _is_to_be_noted(lane, failed):
        return failed
    return _note(lane, batch, held, failed)


def _unnoted(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed):
        return replace(outcome, attempt=None, again_in=None)
    return outcome


def record(lane: Lane, batch: Batch) -> None:
    """Record the failures that the database had no time for in the transaction of the batch."""
    for place, (held, outcome) in enumerate(batch.ended):
        if held.pk in batch.unrecorded and outcome is not None:
            batch.unrecorded.remove(held.pk)
            batch.ended[place] = held, _note(lane, batch, held, _unnoted(outcome))


def _is_to_be_noted(lane: Lane, failed: Failed) -> bool:
    """Return whether to write values to a row whose transaction is lost.

    Without ``retry`` only a failure of the handler itself gives a row up.
    """
    processor = lane.processor
    return processor.retry is not None or (processor._notes_failures and not failed.handled)


def _may_be_noted_later(lane: Lane, error: BaseException | None) -> bool:
    """Return whether a failure that could not be recorded may be recorded a moment later."""
    if lane.run.is_over or lane.run.limits.is_told_to_stop or error is None:
        return False
    return is_database_error(error) and not settling.is_for_good(error)


def _note(lane: Lane, batch: Batch, held: Held, failed: Outcome) -> Outcome:
    """Write what a failure writes, if this worker gets the row again; return its outcome."""
    is_timeout = isinstance(failed, Failed) and isinstance(failed.error, HandlerTimeout)
    noted, second = failed, None
    for pause in WAITS:
        time.sleep(pause)
        # Race: double claim. Without the lock another worker may have finished the row.
        again = Batch(batch.question, Wanted([held.pk]))
        try:
            again.claimed = claim(lane.session, again.question, again.wanted)
            if again.rows:
                work.read_attempts(lane.processor, again.question, again.rows)
                known = again.rows[0].refused or failed
                noted = flips.write_notes(lane, again, again.rows[0], known)
            lane.session.settle(Settlement(again, (COMMIT,)))
        except Exception as raised:  # noqa: BLE001  # the first is the one to be reported
            lane.session.rollback()
            second = raised.__cause__ if isinstance(raised, NotSettled) else raised
            if _may_be_noted_later(lane, second):
                continue
            break
        if again.rows:
            return noted
        if not (is_timeout or second):
            return failed
    if second is not None:
        name = lane.processor.name
        extra = log_fields.fields(
            name, pk=held.pk, outcome="failed", **log_fields.error_fields(second)
        )
        message = "%s: row %s failed, and no attempt was counted: %s"
        log_fields.log(logger, logging.WARNING, message, name, str(held.pk), second, extra=extra)
        # Neither discarded nor snoozed: nothing of that is stored.
        return failed if isinstance(failed, Failed) else Failed(as_exception(second))
    return failed
