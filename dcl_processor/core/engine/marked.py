"""The steps of a delivery that commits a mark before the work: claim, hand out, settle."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from django.db import Error

from dcl_processor.core.engine import bookkeeping
from dcl_processor.core.engine.calls import Call
from dcl_processor.core.engine.context import Context, read_attempts, refuse_wrong_flips
from dcl_processor.core.engine.executors import is_interrupt
from dcl_processor.core.engine.failing import tell_of_less
from dcl_processor.core.engine.joining import keep_settlement, may_keep, with_kept
from dcl_processor.core.engine.rows import Batch, Mark, Row, by_attname
from dcl_processor.core.engine.verify import verify
from dcl_processor.core.report import events
from dcl_processor.core.report.counters import log
from dcl_processor.core.report.exceptions import AttemptsUsedUp
from dcl_processor.core.report.outcomes import Failed, Handled, Lost, Outcome, UsedUp, as_exception
from dcl_processor.core.report.values import Values, constants_of, resolve
from dcl_processor.core.sql.errors import reconnected
from dcl_processor.core.sql.messages import settling
from dcl_processor.core.sql.session import Wanted

#: Seconds that a claim waits for more free places of an event loop.
LINGER = 0.02


def claim_and_mark(run: Context, batch: Batch) -> None:
    """Lock the rows, check them again, mark those that are still pending, and commit."""
    question = batch.question
    mark = run.marks.make(question.model)
    since = run.heartbeat.now() if run.heartbeat is not None else 0.0
    if not run.is_verified and not _verified(run, batch):
        return
    claim = partial(run.session.claim_and_mark, question, batch.wanted, mark.values)
    claimed = with_kept(run, batch, claim)
    if claimed is None:
        return
    batch.mark = mark
    for pk, instance in claimed.rows.items():
        before, expected = claimed.before[pk], mark.recognised(claimed.after[pk])
        batch.rows.append(Row(pk, instance, before=before, expected=expected))
        if mark.lease is not None:
            # A handler's save() leaves alone what is not loaded, and the lease is renewed meanwhile.
            vars(instance).pop(mark.lease.field, None)
    run.source.note_claim(batch, claimed)
    if batch.rows:
        events.tell(events.claimed, run.processor, pks=[*claimed.rows])
        if run.heartbeat is not None and mark.time is not None:
            tokens = {pk: claimed.after[pk][mark.time] for pk in claimed.rows}
            run.heartbeat.hold(question, tokens, since)
        read_attempts(run, question, batch.rows)
        refuse_wrong_flips(run, batch.rows)


def _verified(run: Context, batch: Batch) -> bool:
    """Try the flips on a row, in a transaction that is rolled back; return whether one was free."""
    first = Wanted(batch.wanted.pks[:1], 1)
    claimed = run.session.claim(batch.question, first)
    for pk, instance in claimed.rows.items():
        verify(run.processor, run.session, batch.question, Row(pk, instance))
        run.is_verified = True
    run.session.rollback()
    if not run.is_verified:
        run.source.note_claim(batch, claimed)
    return run.is_verified


def hand_out(run: Context, batch: Batch) -> None:
    """Give the rows to the executor; rows that may not be handled are settled at once."""
    rows = [row for row in batch.rows if row.refused is None]
    for row in batch.rows:
        if row.refused is not None:
            settle(run, batch, row, row.refused)
    size = run.processor.batch_size if run.handler.is_batch and not batch.is_alone else 1
    for at in range(0, len(rows), size):
        run.submit(Call(batch, rows[at : at + size]))


def settle_ended(run: Context) -> None:
    """Settle the rows whose handlers have ended, until there is room for the next claim."""
    while run.calls and not run.room:
        settle_next(run, LINGER)


def settle_next(run: Context, timeout: float | None = None) -> None:
    """Wait for the next handler that ends, and settle its rows.

    ``timeout``: seconds after which free places are filled although there are few.
    """
    ended = run.executor.collect(timeout)
    run.is_eager = ended is None
    if ended is None:
        return
    settle_call(run, *ended)


def settle_call(run: Context, call: Call, result: Any) -> None:
    """Settle the rows of a call that has ended; an interrupt is raised."""
    run.calls.discard(call)
    if is_interrupt(result):
        raise result  # type: ignore[misc]
    if isinstance(result, BaseException):
        result = Failed(as_exception(result))
    several, batch = len(call.rows) > 1, call.batch
    if several and isinstance(result, Failed) and batch.mark is not None and batch.mark.lease:
        # Each row is handled again alone, as the same attempt.
        run.counters.counts["redone"] += len(call.rows)
        for row in call.rows:
            run.submit(Call(batch, [row]))
        return
    for row in call.rows:
        settle(run, batch, row, result[row.pk] if isinstance(result, Mapping) else result)


# --- one row


def settle(run: Context, batch: Batch, row: Row, outcome: Outcome | None) -> None:
    """Write a row's outcome if it still has its mark, and count it; or keep that for a while."""
    if not _kept(run, batch, row, outcome):
        settle_now(run, batch, row, outcome)


def _kept(run: Context, batch: Batch, row: Row, outcome: Outcome | None) -> bool:
    """Keep the settlement of the last row of a batch until the next claim, if it comes at once."""
    mark, question = batch.mark, batch.question
    is_plain = type(outcome) is Handled and mark is not None and not mark.is_flip
    if not is_plain or run.calls or run.is_unproven or not question.own_table or not may_keep(run):
        return False
    try:
        _, values = _decided(run, batch, row, outcome)
        statement = settling(question, row.pk, expected_of(run, row), values)
    except Exception:  # noqa: BLE001  # settling it now raises the error again, as the row's failure
        return False
    if statement is None:
        return False
    keep_settlement(run, row, outcome, statement, partial(settle_now, run, batch, row, outcome))
    return True


def settle_now(run: Context, batch: Batch, row: Row, outcome: Outcome | None) -> None:
    try:
        final = _settled(run, batch, row, outcome)
    except Exception as error:
        final = _unsettled(run, batch, row, outcome, error)
    run.source.end([row.pk])
    if final is None:
        run.source.put_back([row.pk])
        return
    if isinstance(final, Handled):
        run.note_handled([row.pk])
    run.counters.count(row.pk, final)
    if run.is_unproven and isinstance(final, Handled):
        run.is_unproven = False
        run.look_at_handled()


def _settled(run: Context, batch: Batch, row: Row, outcome: Outcome | None) -> Outcome | None:
    final, values = _decided(run, batch, row, outcome)
    if not values:
        _let_go(run, row)
        return final
    return final if write(run, batch, row, values) else _not_written(run, batch, row, final)


def _unsettled(
    run: Context, batch: Batch, row: Row, outcome: Outcome | None, error: Exception
) -> Outcome | None:
    """Record the error of a settlement as the row's failure, with less of it if need be."""
    mark = batch.mark
    assert mark is not None
    failed: Outcome = Failed(error, handled=True)
    if isinstance(outcome, Handled) and mark.lease is None:
        return failed  # done but not recorded: it stays in doubt, and is not repeated
    if isinstance(outcome, Failed):
        failed = outcome
    try:
        final, values = _values_of_failure(run, batch, row, failed)
        for some in bookkeeping.reduced(run.processor, values, [*mark.removed, *mark.reset]):
            try:
                written = write(run, batch, row, some)
            except Exception as refused:  # noqa: BLE001  # it is logged, and less is tried
                error = refused
                continue
            if some is not values:
                tell_of_less(run, row, values, some, error)
            return final if written else _not_written(run, batch, row, final)
    except Exception as second:  # noqa: BLE001  # it is counted with the first error
        error = second
    message = "%s: row %s could not be settled: %s"
    log(logging.WARNING, message, run.processor.name, str(row.pk), error)
    return failed if not isinstance(outcome, UsedUp) else None


def write(run: Context, batch: Batch, row: Row, values: Values) -> bool:
    """Write, on a new connection if the session is lost; return whether this worker had the row."""
    expected, session = expected_of(run, row), run.session
    values = resolve(values)
    try:
        return session.settle(batch.question, row.pk, expected, values)
    except bookkeeping.UNWRITABLE as error:
        raise bookkeeping.invalid_done(run.processor.name, error) from error
    except Error:
        if not reconnected(session.using):
            raise
        # A second write does no harm, because the first removes the mark that it requires.
        if session.settle(batch.question, row.pk, expected, values):
            return True
        return batch.question.table.filter(pk=row.pk, **constants_of(values)).exists()


def expected_of(run: Context, row: Row) -> Values:
    """Return what recognises the row as this worker's; ends its renewals."""
    if run.heartbeat is not None and (tokens := run.heartbeat.let_go(row.pk)):
        row.expected = {run.heartbeat.field: tokens}
    return row.expected


def _let_go(run: Context, row: Row) -> None:
    if run.heartbeat is not None:
        run.heartbeat.let_go(row.pk)


def _decided(
    run: Context, batch: Batch, row: Row, outcome: Outcome | None
) -> tuple[Outcome | None, Values]:
    """Return the outcome to report for a row, and the values to write to it."""
    mark = batch.mark
    assert mark is not None
    unstarted = isinstance(outcome, Failed) and outcome.unstarted
    if outcome is None or unstarted or isinstance(outcome, Lost | UsedUp):
        # Not started. If no other worker has taken the row over yet, no attempt is counted.
        return outcome, mark.put_back(row.before)
    if not isinstance(outcome, Handled):
        return _values_of_failure(run, batch, row, outcome)
    if row.instance.pk != row.pk:
        bookkeeping.refuse_moved(run.processor, row, batch.question.table)
    if mark.is_flip:
        return outcome, {}  # flipped before the work
    flip = run.fixed_flip
    if flip is None:
        flip = resolve(bookkeeping.flip(run.processor, row.instance, outcome.result))
    return outcome, {**mark.removed, **flip}


def _values_of_failure(
    run: Context, batch: Batch, row: Row, outcome: Outcome
) -> tuple[Outcome, Values]:
    processor, mark = run.processor, batch.mark
    assert mark is not None
    is_lease = mark.lease is not None
    if isinstance(outcome, Failed) and outcome.handled and not is_lease:
        return outcome, {}  # done but not recorded: it stays in doubt, and is not repeated
    # Without retry a claimed row that failed is recorded as failed, and is not put back.
    stays_claimed = not is_lease and not processor.retry and isinstance(outcome, Failed)
    undone = None if stays_claimed else mark.undone
    outcome, noted = bookkeeping.noted(processor, row, outcome, undone=undone)
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        if processor.retry is not None and processor.retry.attempts is not None:
            # The claim counted one more attempt, for which no handler was called.
            noted = {**noted, processor.retry.attempts: outcome.max_attempts}
    columns = set(processor.retry.columns) if processor.retry else set()
    if not is_lease and not noted.keys() - columns:
        return outcome, noted  # still claimed, so in_doubt() still returns it
    if mark.reset:
        noted = {**mark.reset, **by_attname(batch.question.model, noted)}
    return outcome, {**mark.removed, **noted}


def _not_written(run: Context, batch: Batch, row: Row, final: Outcome | None) -> Outcome | None:
    """Return the outcome of a row that no longer had this worker's mark."""
    if final is None or isinstance(final, Lost | UsedUp):
        return final
    name, pk = run.processor.name, str(row.pk)
    if not batch.question.table.filter(pk=row.pk).exists():
        return final  # the handler has deleted it
    if isinstance(final, Failed):
        message = "%s: row %s was taken over while it failed: %s"
        log(logging.WARNING, message, name, pk, final.error)
    else:
        log(logging.WARNING, "%s: row %s was taken over before it was settled", name, pk)
    return Lost()


# --- rows that were marked and not started when the run ends


def put_back_unstarted(run: Context) -> None:
    """Put back the rows whose handlers were not called, with one statement for rows alike."""
    alike: dict[str, tuple[Values, list[Any], Values, Any]] = {}
    for call in [*run.calls]:
        for row in call.rows:
            mark: Mark | None = call.batch.mark
            if row in call.batch.started or mark is None:
                continue
            run.calls.discard(call)
            values, expected = mark.put_back(row.before), expected_of(run, row)
            key = repr((values, expected))
            alike.setdefault(key, (values, [], expected, call.batch.question))[1].append(row.pk)
    for values, pks, expected, question in alike.values():
        rows = question.table.filter(pk__in=pks)
        for name, value in expected.items():
            rows = rows.filter(**{f"{name}__in" if isinstance(value, list) else name: value})
        rows.update(**resolve(values))
