"""Write the outcomes of rows with a mark, each only if the row still has it.

Work that is done is settled: a settlement that the database refuses for another reason than its
values is tried again for as long as the lease lives, between the other rows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.db import DataError, connections

from dcl_processor import log_fields
from dcl_processor import steady as time
from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import (
    is_about_rows,
    is_contention,
    is_database_error,
    is_refusal,
    is_refused_statement,
)
from dcl_processor.database.time_limit import lock_timeout
from dcl_processor.definition.model_columns import by_attname
from dcl_processor.exceptions import AttemptsUsedUp, InvalidDone, StillPending
from dcl_processor.execution.handler import (
    Discarded,
    Failed,
    Handled,
    Lost,
    Outcome,
    Snoozed,
    as_exception,
)
from dcl_processor.interrupts import ends_the_run
from dcl_processor.locking.row_locks import settlement_transaction
from dcl_processor.settlement import writing
from dcl_processor.settlement.outcome_values import UNWRITABLE, invalid_done
from dcl_processor.settlement.writing import Expected
from dcl_processor.values import Values, constants_of, resolve

from . import flips
from .claim import look
from .settlement import Batch, Held, Settlement, Statement

if TYPE_CHECKING:
    from .lane import Lane

logger = logging.getLogger("dcl_processor")

#: Seconds that a settlement waits for a row which another session has locked; then the lane goes
#: on, and comes back to it.
LOCK_WAIT = 0.2

#: Seconds between two tries of a settlement: the first pause, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0

#: Seconds for which the settlement of a row without a lease is tried again, and that of any row
#: when the run is to stop.
TRY_FOR, TRY_AT_STOP = 5.0, 0.6


#: Values, what is expected of rows, and the rows that one statement writes.
Alike = tuple[Values, Expected, list[Held]]


class _SomeRowsLostError(Exception):
    """A row was taken over, or is gone; settling each row alone finds out which one."""


def settle(lane: Lane, batch: Batch) -> Settlement:
    """Settle the rows that have ended; nothing is left to send.

    A settlement writes nothing to a row that was taken over.
    """
    settle_ended(lane, batch)
    return Settlement(batch, (), answers=())


def _open_rows(batch: Batch) -> list[int]:
    """Return the places of the rows that are to be settled for the first time."""
    return [
        place
        for place, (held, _) in enumerate(batch.ended)
        if not held.marked.is_settled and held.marked.try_until is None
    ]


def is_for_good(error: BaseException) -> bool:
    """Return whether the database would refuse the same statement a moment later, too."""
    return is_about_rows(error) or is_refused_statement(error)


def _is_refusal(error: Exception) -> bool:
    """Return whether the values are refused, by the database or by the check of them."""
    return is_for_good(error) or not (is_database_error(error) or ends_the_run(error))


# --- one row


def settle_row(lane: Lane, batch: Batch, place: int, *, is_last: bool = False) -> None:
    """Settle a row; its final outcome may be another one. It may have to be tried again later.

    An interrupt during the write is raised again after one more write, and at once if ``is_last``.
    """
    held, outcome = batch.ended[place]
    marked = held.marked
    try:
        # Race: work without flip. The next line is inside the ``try``: after an interrupt in it,
        # the row is still settled.
        final = _settled(lane, batch, held, outcome)
    except BaseException as error:
        if ends_the_run(error):
            if not is_last:
                # Race: work without flip. The work is done, so an interrupt during the write must
                # not lose the flip. The interrupted write may have been committed.
                marked.may_be_written = True
                settle_row(lane, batch, place, is_last=True)
            else:
                marked.is_settled = True
                if outcome is not None and not isinstance(outcome, Lost):
                    batch.ended[place] = held, Lost()
            raise
        if not isinstance(error, Exception):
            raise
        if not is_last and _is_to_be_tried_again(lane, batch, held, error):
            return
        final = _unsettled(lane, batch, held, outcome, error)
    marked.is_settled = True
    batch.ended[place] = held, final


def _is_to_be_tried_again(lane: Lane, batch: Batch, held: Held, error: Exception) -> bool:
    """Return whether the lane comes back to the row, and note when."""
    marked, now = held.marked, time.monotonic()
    if _is_refusal(error) or connections[batch.question.using].in_atomic_block:
        return False
    if marked.try_until is None:
        marked.try_until = now + TRY_FOR if marked.lease_end is None else marked.lease_end
        marked.try_again = now
        _warn(lane, held, "%s: row %s is not settled yet, and is tried again: %s", error)
    if now >= marked.try_until:
        return False
    marked.try_again = now + min(LONGEST_PAUSE, max(FIRST_PAUSE, now - marked.try_again))
    return True


def _settled(lane: Lane, batch: Batch, held: Held, outcome: Outcome | None) -> Outcome | None:
    """Write what settles a row, and return its final outcome; raises if nothing was written.

    A failure is recorded with less of what belongs to it if the database refuses that. Under a
    lease a flip that is refused is a failure.
    """
    final, values = _decided(lane, batch, held, outcome)
    if not values:
        return final
    refused: Exception | None = None
    for some in filter(None, _reduced(lane, batch, held, final, values)):
        try:
            if not _write(lane, batch, held, some, final):
                return _not_written(lane, batch, held, final)
        except Exception as error:
            if not _is_refusal(error):
                raise
            refused = refused or error
            continue
        if refused is None:
            return final
        left_out = values.keys() - some.keys()
        flips.tell_of_rest(lane.processor, [held.pk], left_out, refused)
        return _without_way_back(batch, final, left_out)
    assert refused is not None
    assert batch.mark is not None
    if not isinstance(final, Handled) or not batch.mark.is_lease:
        raise refused
    held.marked.decided = None
    return _settled(lane, batch, held, not_flipped(final, refused))


def _decided(
    lane: Lane, batch: Batch, held: Held, outcome: Outcome | None
) -> tuple[Outcome | None, Values]:
    """Return the outcome to report for a row, and the values to write to it.

    They are the same whenever it is asked, because callables in them are called once.
    """
    marked = held.marked
    if marked.decided is None:
        marked.decided = _values(lane, batch, held, outcome)
    return marked.decided


def _values(
    lane: Lane, batch: Batch, held: Held, outcome: Outcome | None
) -> tuple[Outcome | None, Values]:
    mark = batch.mark
    assert mark is not None
    unstarted = isinstance(outcome, Failed) and outcome.unstarted
    if outcome is None or unstarted or isinstance(outcome, Lost):
        # Not started. If no other worker has taken the row over yet, no attempt is counted.
        return outcome, mark.put_back(held.marked.before)
    if isinstance(outcome, Handled):
        if mark.option == "done":
            return outcome, {}  # flipped before the work
        try:
            return outcome, _flip(lane, batch, held, outcome)
        except BaseException as error:
            if ends_the_run(error):
                raise
            outcome = not_flipped(outcome, as_exception(error))
    return _values_of_failure(lane, batch, held, outcome)


def not_flipped(outcome: Outcome | None, error: Exception) -> Failed:
    """Return the outcome of a row after whose handler, or before it, the flip was not written."""
    refused = isinstance(error, StillPending | InvalidDone) or is_refusal(error)
    done = outcome if isinstance(outcome, Handled) else Handled()
    result, duration = done.result, done.duration
    return Failed(error, handled=True, refused=refused, result=result, duration=duration)


def _values_of_failure(
    lane: Lane, batch: Batch, held: Held, outcome: Outcome
) -> tuple[Outcome, Values]:
    processor, mark = lane.processor, batch.mark
    assert mark is not None
    if isinstance(outcome, Failed) and outcome.handled and not mark.is_lease:
        return outcome, {}  # done but not recorded: it stays in doubt, and is not repeated
    # Without retry a claimed row that failed is recorded as failed, and is not put back.
    stays_claimed = not mark.is_lease and not processor.retry and isinstance(outcome, Failed)
    undone = None if stays_claimed else mark.undone
    outcome, noted = flips.noted_of(lane, held, outcome, undone=undone)
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        assert processor.retry is not None
        # The claim counted one more attempt, for which no handler was called.
        noted = {**noted, processor.retry.attempts: outcome.max_attempts}
    columns = set(processor.retry.columns) if processor.retry else set()
    if not mark.is_lease and not noted.keys() - columns:
        return outcome, noted  # still claimed, so in_doubt() still returns it
    if mark.reset:
        # A failure that writes a dead letter, and one that writes nothing, remove the mark, too.
        noted = {**mark.reset, **by_attname(batch.question.model, noted)}
    return outcome, {**mark.removed, **noted}


def _flip(lane: Lane, batch: Batch, held: Held, outcome: Handled) -> Values:
    """Return the values that take a handled row out of pending, and remove its mark."""
    assert batch.mark is not None
    return {**batch.mark.removed, **flips.flip_of(lane, held, outcome.result)}


def expected_of(lane: Lane, held: Held) -> Expected:
    """Return what recognises the row as this worker's in its last write; ends its renewals.

    A claim is recognised by all columns that it wrote, as they were read back. A lease is
    recognised by every token that this worker may have written.
    """
    marked, heartbeat = held.marked, lane.run.heartbeat
    if marked.expected is None:
        if heartbeat is not None:
            marked.lease_end = heartbeat.end_of(held.pk)
            marked.expected = heartbeat.let_go(held.pk, marked.after)
        else:
            marked.expected = {name: [value] for name, value in marked.after.items()}
    return marked.expected


def _write(lane: Lane, batch: Batch, held: Held, values: Values, outcome: Outcome | None) -> bool:
    """Write, on a new connection if the session is lost; return whether this worker had the row."""
    is_flip, using = isinstance(outcome, Handled), batch.question.using
    expected, resolved = expected_of(lane, held), resolve(values)
    marked = held.marked
    for is_second in (False, True):
        session = connections[using].connection
        try:
            written = _write_once(lane, batch, held, expected, resolved, is_flip=is_flip)
        except UNWRITABLE as error:
            if is_flip:
                raise invalid_done(lane.processor, error) from error
            raise
        except Exception as error:
            is_new = _is_on_new_session(error, using, session)
            # Also if there is no new session yet: the write may have been committed without answer.
            if connections[using].connection is not session:
                marked.may_be_written = True
            # A second write does no harm, because the first removes the mark that it requires.
            if is_second or not is_new:
                raise
        else:
            return bool(written) or (marked.may_be_written and _is_there(batch, held, values))
    raise AssertionError("the second write returns or raises")


def _is_on_new_session(error: Exception, using: str, session: Any) -> bool:
    """Return whether the session was lost, and there is another one."""
    return not _is_refusal(error) and reconnected(using, since=session)


def _write_once(
    lane: Lane, batch: Batch, held: Held, expected: Expected, values: Values, *, is_flip: bool
) -> int:
    question, connection = batch.question, lane.session.connection
    check, inside = is_flip and lane.run.looks_after_flips, connection.in_atomic_block
    # A rule may turn one statement into several.
    # Without a lease the claim, too, keeps a row out of pending, and more has to be asked.
    may_look = lane.processor.lease is not None and lane.session.combines
    if not (inside or lane.run.has_rules or (check and not may_look)):
        found = writing.statement_if_free(question, held.pk, expected, values)
        if found is not None and _is_written_at_once(lane, batch, held, found, look_too=check):
            return 1
    # Another session has the row, or has locked it. Race: work without flip. The work is done, so
    # that a lock must not lose the flip; nor keep the other rows waiting.
    limited = connection.features.has_select_for_update and not inside
    with (
        settlement_transaction(question.using) if check or limited or inside else nullcontext(),
        lock_timeout(question.using, LOCK_WAIT) if limited else nullcontext(),
    ):
        written = writing.compare_and_set(question, held.pk, expected, values)
        if check and written:
            writing.refuse_pending(lane.processor, question, [held.pk])
    return written


def _is_written_at_once(
    lane: Lane, batch: Batch, held: Held, found: tuple[str, Any], *, look_too: bool
) -> bool:
    """Return whether one message has written the row, and it is not pending any more."""
    looks = [look(batch.question, [held.pk])] if look_too else []
    try:
        return bool(lane.session.execute_all([Statement(*found), *looks])[0])
    except DataError as error:
        if writing.explained(error, lane.processor, [held.pk]) is error:
            raise
    return False  # a row that is not written is still pending, too


def _is_answer(error: Exception, using: str, session: Any) -> bool:
    """Return whether the database reported that nothing was written."""
    connection: Any = connections[using]
    return is_contention(error) or (connection.connection is session and connection.is_usable())


def _is_there(batch: Batch, held: Held, values: Values) -> bool:
    """Return whether the row has all values; a write whose answer was lost may be committed."""
    table = batch.question.table
    return table.filter(pk=held.pk, **constants_of(values)).exists()


def _not_written(lane: Lane, batch: Batch, held: Held, outcome: Outcome | None) -> Outcome | None:
    """Return the outcome of a row that no longer had this worker's mark."""
    if outcome is None or isinstance(outcome, Lost):
        return outcome
    table = batch.question.table
    # A query is needed, because the handler may have deleted its row.
    if table.filter(pk=held.pk).exists():
        if writing.is_held(batch.question, held.pk, expected_of(lane, held)):
            raise writing.not_written(lane.processor.name, [held.pk])
        if isinstance(outcome, Failed):
            _warn(lane, held, "%s: row %s was taken over while it failed: %s", outcome.error)
        else:
            name, message = lane.processor.name, "%s: row %s was taken over before it was settled"
            extra = log_fields.fields(name, pk=held.pk, attempt=held.attempt)
            log_fields.log(logger, logging.WARNING, message, name, str(held.pk), extra=extra)
        return Lost()
    if isinstance(outcome, Handled):
        writing.refuse_moved(batch.question, {held.pk: held.row}, lane.processor)
    return outcome


def _unsettled(
    lane: Lane, batch: Batch, held: Held, outcome: Outcome | None, error: Exception
) -> Outcome | None:
    """Return the outcome of a row to which nothing could be written."""
    final = outcome if held.marked.decided is None else held.marked.decided[0]
    assert batch.mark is not None
    if final is None or isinstance(final, Lost):
        _warn(lane, held, "%s: row %s was not put back: %s", error)
        return final
    if isinstance(final, Handled) and not batch.mark.is_lease:
        return not_flipped(final, error)
    held.marked.refused = error
    if isinstance(final, Handled):
        _warn(lane, held, "%s: row %s was handled, but not settled: %s", error)
        return Lost()
    _warn(lane, held, "%s: row %s was not settled: %s", error)
    return final if isinstance(final, Failed) else Failed(error)


def _without_way_back(
    batch: Batch, final: Outcome | None, left_out: Collection[str]
) -> Outcome | None:
    """Return the outcome of a row that is in doubt if its claim could not be removed."""
    mark = batch.mark
    assert mark is not None
    if mark.is_lease or not isinstance(final, Failed) or not {*left_out} & {*(mark.undone or ())}:
        return final
    return replace(final, again_in=None)


def _reduced(
    lane: Lane, batch: Batch, held: Held, outcome: Outcome | None, values: Values
) -> Iterator[Values]:
    """Yield the values, and then less of them if they record a failure.

    At last those of the ``retry`` and the lease alone. If even the mark cannot be removed, because
    ``reset`` is refused, the lease lasts for as long as the row is to wait.
    """
    if not isinstance(outcome, Failed | Snoozed | Discarded):
        yield values
        return
    mark, retry = batch.mark, lane.processor.retry
    assert mark is not None
    # A claim loses its time only together with what takes the row out of doubt.
    kept = {*mark.removed, *mark.reset} if mark.is_lease else ()
    some: Values = values
    for some in flips.reduced(lane.processor, values, held, outcome, kept):
        yield some
    if retry is None:
        return
    count = {name: each for name, each in some.items() if name == retry.attempts}
    own = {name: each for name, each in values.items() if name == retry.next_attempt_at}
    if mark.lease is not None and own:
        own[mark.lease.field] = own[str(retry.next_attempt_at)]
    yield from [each for each in ({**own, **count}, count) if each]


def _warn(lane: Lane, held: Held, message: str, error: Exception) -> None:
    name = lane.processor.name
    extra = log_fields.fields(
        name, pk=held.pk, attempt=held.attempt, **log_fields.error_fields(error)
    )
    log_fields.log(logger, logging.WARNING, message, name, str(held.pk), error, extra=extra)


def settle_now(lane: Lane, batch: Batch, outcome: Outcome) -> Outcome:
    """Settle the batch's one row, which was handled elsewhere; return its final outcome.

    Raises the error if nothing could be written to a row that is still this worker's.
    """
    [held] = batch.rows
    batch.ended.append((held, outcome))
    while not settle_ended(lane, batch):
        time.sleep(FIRST_PAUSE)
    if held.marked.refused is not None:
        raise held.marked.refused
    final = batch.ended[0][1]
    assert final is not None
    return final


def release(lane: Lane, batch: Batch) -> bool:
    """Remove the mark from the batch's one row, as if it had not been claimed.

    Returns whether the row still had it.
    """
    [held] = batch.rows
    assert batch.mark is not None
    return _write(lane, batch, held, batch.mark.put_back(held.marked.before), None)


# --- several rows


def settle_ended(lane: Lane, batch: Batch) -> bool:
    """Settle the rows whose handlers have ended, those with the same flip in one statement.

    Rows that could not be settled are tried again when it is time. Returns whether all are settled.
    """
    if len(batch.ended) > 1 and len(open_rows := _open_rows(batch)) > 1:
        _settle_together(lane, batch, open_rows)
    is_over, now = True, time.monotonic()
    for place, (held, _) in enumerate(batch.ended):
        marked = held.marked
        if not marked.is_settled and marked.try_again <= now:
            settle_row(lane, batch, place)
        is_over = is_over and marked.is_settled
    return is_over


def _settle_together(lane: Lane, batch: Batch, places: Sequence[int]) -> None:
    """Flip rows by as few statements as possible, in one transaction, and leave the others.

    Any error rolls back all of them; settling each row alone then finds the one to blame, or the
    one that was taken over.
    """
    try:
        alike = [*_alike(lane, batch, places)]
    except Exception as error:
        if ends_the_run(error):
            raise
        return  # a value that cannot be compared is its row's failure, if it cannot be written
    if alike:
        _settle_alike(lane, batch, alike)


def _settle_alike(lane: Lane, batch: Batch, alike: Sequence[Alike]) -> None:
    rows = [held for *_, some in alike for held in some]
    using = batch.question.using
    session = connections[using].connection
    # Recorded before the write: if the answer is lost, the rows may still have been written.
    _may_be_written(rows, is_so=True)
    try:
        _flip_together(lane, batch, alike, [held.pk for held in rows])
    except Exception as error:
        if ends_the_run(error):
            raise
        if not is_database_error(error) or _is_answer(error, using, session):
            _may_be_written(rows, is_so=False)
        if not isinstance(error, _SomeRowsLostError):
            name = lane.processor.name
            extra = log_fields.fields(name, row_count=len(rows), **log_fields.error_fields(error))
            message = "%s: settling rows one by one: %s"
            log_fields.log(logger, logging.WARNING, message, name, error, extra=extra)
    else:
        for held in rows:
            held.marked.is_settled = True


def _may_be_written(rows: Sequence[Held], *, is_so: bool) -> None:
    for held in rows:
        held.marked.may_be_written = is_so


def _alike(lane: Lane, batch: Batch, places: Sequence[int]) -> Iterator[Alike]:
    """Yield values, expected values, and the rows that one statement can write."""
    rows, values = dict[Any, Held](), dict[Any, Values]()
    for held, outcome in [batch.ended[place] for place in places]:
        if isinstance(outcome, Handled):
            final, flip = _decided(lane, batch, held, outcome)
            # A row that was flipped before the work is not written to after it.
            if final is outcome and flip:
                rows[held.pk], values[held.pk] = held, flip
    for flip, pks in writing.group(values):
        for theirs, some in writing.group({pk: expected_of(lane, rows[pk]) for pk in pks}):
            yield flip, theirs, [rows[pk] for pk in some]


def _flip_together(lane: Lane, batch: Batch, alike: Sequence[Alike], pks: Sequence[Any]) -> None:
    question = batch.question
    with settlement_transaction(question.using):
        for values, expected, rows in alike:
            some = [held.pk for held in rows]
            # Race: lost lease that writes. A row that another worker has taken over does not match.
            # Nor does one that is locked, which would keep the others waiting.
            if writing.compare_and_set_free(question, some, expected, values) != len(some):
                raise _SomeRowsLostError
        if lane.run.looks_after_flips:
            writing.refuse_pending(lane.processor, question, pks)


# --- the end of a batch


def hurry(batch: Batch) -> None:
    """Let no row be tried for longer than the end of a run may take."""
    end = time.monotonic() + TRY_AT_STOP
    for held, _ in batch.ended:
        marked = held.marked
        if marked.try_until is not None and not marked.is_settled:
            marked.try_until = min(marked.try_until, end)


def clear_up(lane: Lane, batch: Batch) -> None:
    """Settle the rows that ended during an interrupt, and put back those that were not started."""
    ended, mark = {held.pk for held, _ in batch.ended}, batch.mark
    assert mark is not None
    for held in batch.rows:
        is_to_be_put_back = mark.is_lease or held not in batch.started
        if held.has_mark and held.pk not in ended and is_to_be_put_back:
            batch.ended.append((held, None))
    for place, (held, _) in enumerate(batch.ended):
        if held.has_mark and not held.marked.is_settled:
            settle_row(lane, batch, place, is_last=True)
