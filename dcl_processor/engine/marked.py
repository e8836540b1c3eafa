"""The steps of a delivery that commits a mark before the work: claim, hand out, settle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcl_processor.engine.calls import Call
from dcl_processor.engine.context import Context, read_attempts
from dcl_processor.engine.rows import Batch, Row, mark_of_claim
from dcl_processor.engine.settle import FIRST_PAUSE, next_try, settle, write_settled
from dcl_processor.engine.verify import verify
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import raise_interrupt
from dcl_processor.report.outcomes import Failed, as_exception

#: Seconds that a claim waits for more free places of an event loop.
LINGER = 0.02


def claim_and_mark(run: Context, batch: Batch) -> None:
    """Lock the rows, check them again, mark those that are still pending, and commit."""
    question = batch.question
    mark = mark_of_claim(run.processor, question.model)
    since = time.monotonic()
    is_verified = question.model in run.processor._identity.verified
    if not (is_verified or _verified(run, batch)):
        return
    if run.unproven:
        run.source.put_back(batch.wanted.pks[1:])
        batch.wanted = batch.wanted.only(batch.wanted.pks[0])
    batch.mark = mark
    hides = mark.lease is None
    claimed = run.session.claim_and_mark(question, batch.wanted, mark.values, hides=hides)
    for pk, instance in claimed.rows.items():
        before, expected = claimed.before[pk], mark.recognised(claimed.after[pk])
        row = Row(pk, instance, before=before, expected=expected)
        batch.rows.append(row)
        if mark.lease is not None:
            # A handler's save() leaves alone what is not loaded: the lease is renewed meanwhile.
            vars(instance).pop(mark.lease.field, None)
    run.source.note_claim(batch, claimed)
    if batch.rows:
        if run.heartbeat is not None and mark.lease is not None:
            tokens = {pk: claimed.after[pk][mark.lease.field] for pk in claimed.rows}
            run.heartbeat.hold(question, tokens, since)
        if run.processor.retry is not None:
            read_attempts(run.processor.retry, question, batch.rows)


def _verified(run: Context, batch: Batch) -> bool:
    """Try the flips on a row, in a transaction that is rolled back; return whether one was free."""
    first, *others = batch.wanted.pks
    one = batch.wanted.only(first)
    claimed = run.session.claim(batch.question, one)
    for pk, instance in claimed.rows.items():
        verify(run.processor, run.session, batch.question, Row(pk, instance))
    run.session.rollback()
    if not claimed.rows:
        batch.wanted = one
        run.source.note_claim(batch, claimed)
        run.source.put_back(others)
    return bool(claimed.rows)


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
    write_settled(run)
    while run.calls and not run.room:
        settle_next(run, LINGER)


def settle_next(run: Context, timeout: float | None = None) -> None:
    """Wait for the next handler that ends, and settle its rows and those that end with them.

    ``timeout``: seconds after which free places are filled although there are few.
    """
    wait = next_try(run)
    if wait is not None and wait <= FIRST_PAUSE:  # the row's own heartbeat may have it locked
        run.limits.pause(wait)
        write_settled(run)
        wait = next_try(run)
    if run.calls:
        ended = run.executor.collect(timeout if wait is None else wait)
        run.is_eager = ended is None
        while ended is not None:
            settle_call(run, *ended)
            ended = run.executor.collect(0)
    else:
        run.limits.pause(wait or 0)
    write_settled(run)


def settle_call(run: Context, call: Call, result: Any) -> None:
    """Settle the rows of a call that has ended; an interrupt is raised."""
    run.calls.discard(call)
    if isinstance(result, BaseException):
        raise_interrupt(result)
        result = Failed(as_exception(result))
    batch = call.batch
    if len(call.rows) > 1 and isinstance(result, Failed):
        # Each row is handled again alone, as the same attempt.
        run.counters.counts["redone"] += len(call.rows)
        for row in call.rows:
            run.submit(Call(batch, [row]))
        return
    for row in call.rows:
        settle(run, batch, row, result[row.pk] if isinstance(result, Mapping) else result)


def put_back_unstarted(run: Context) -> None:
    """Put back the marked rows whose handlers were not called, at the end of a run."""
    for call in [*run.calls]:
        if not call.is_started:
            run.calls.discard(call)
            for row in call.rows:
                settle(run, call.batch, row, None)
    write_settled(run)
