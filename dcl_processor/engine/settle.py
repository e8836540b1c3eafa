"""The settlements of marked rows: each is decided once, and written when the database lets it.

An outcome that cannot be written for a while, because the row is locked or the server away, is
tried again while the row's lease lives, which is renewed; without a lease for 5 s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from dcl_processor.engine import bookkeeping
from dcl_processor.engine.context import Context
from dcl_processor.engine.failing import log_refused
from dcl_processor.engine.rows import Batch, Row, Unsettled
from dcl_processor.options.model_columns import by_attname
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import fenced_by, these
from dcl_processor.report.errors import described, raise_interrupt
from dcl_processor.report.exceptions import AttemptsUsedUp
from dcl_processor.report.log import log
from dcl_processor.report.outcomes import Failed, Handled, Lost, Outcome, Snoozed
from dcl_processor.report.values import Values, constants_of
from dcl_processor.sql.errors import is_contention, is_passing, reconnected
from dcl_processor.sql.steps import Write

#: Seconds for which a settlement without a lease is tried.
PATIENCE = 5.0

#: Seconds between two tries, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5


def settle(run: Context, batch: Batch, row: Row, outcome: Outcome | None) -> None:
    """Decide what is written to a row, once; it is written by the next ``write_settled()``."""
    try:
        final, values = _decided(run, batch, row, outcome)
    except Exception as error:  # noqa: BLE001  # of the user's flip
        final, values = _refused(run, Unsettled(batch, row, outcome, {}, 0), error)
    if values:
        run.unsettled.append(Unsettled(batch, row, final, values, time.monotonic()))
    else:
        _end(run, row, final)


def next_try(run: Context) -> float | None:
    """Return the seconds until an outcome is to be written again; ``None``: there is none."""
    if not run.unsettled:
        return None
    first = min([each.again_at for each in run.unsettled])
    return max(first - time.monotonic(), 0.0)


def write_settled(run: Context) -> None:
    """Write the outcomes that are due; those that are written alike in one statement."""
    while due := [each for each in run.unsettled if each.again_at <= time.monotonic()]:
        alike: dict[Any, list[Unsettled]] = {}
        for each in due:
            alike.setdefault(_likeness(run, each), []).append(each)
        for some in alike.values():
            _write(run, some)


def _likeness(run: Context, each: Unsettled) -> Any:
    if not isinstance(each.row.pk, int | str | UUID):
        return id(each)
    values = bookkeeping.likeness(each.values)
    expected = repr(_expected(run, each.row))
    return id(each.batch.question), each.asks, values, expected, each.again_at == 0


def _expected(run: Context, row: Row) -> Values:
    if run.heartbeat is not None and (tokens := run.heartbeat.tokens(row.pk)):
        return {run.heartbeat.field: tokens}
    return row.expected


def _write(run: Context, some: Sequence[Unsettled]) -> None:
    first = some[0]
    question, pks = first.batch.question, [each.row.pk for each in some]
    write = Write(first.values, pks, first.asks, _expected(run, first.row))
    try:
        written = {*run.session.settle(question, write)}
    except BaseException as error:
        for each in some:
            each.was_sent = True
        if not isinstance(error, Exception):
            raise
        _not_written(run, some, error)
        return
    for each in some:
        if each.row.pk in written:
            _finish(run, each, each.outcome)
    missed = [each for each in some if each.row.pk not in written]
    if missed:
        _look_up(run, missed)


def _not_written(run: Context, some: Sequence[Unsettled], error: Exception) -> None:
    raise_interrupt(error)
    if is_passing(error):
        reconnected(run.session.using)
        for each in some:
            _wait(run, each, error)
    elif len(some) > 1:
        for each in some:
            _write(run, [each])
    else:
        [each] = some
        run.unsettled.remove(each)
        outcome, values = _refused(run, each, error)
        if values:
            again = Unsettled(each.batch, each.row, outcome, values, each.since)
            run.unsettled.append(again)
        else:
            _end(run, each.row, outcome)


def _refused(run: Context, each: Unsettled, error: Exception) -> tuple[Outcome | None, Values]:
    """Return the outcome of a row whose settlement the database refuses, and what records it."""
    raise_interrupt(error)
    name, row, outcome = run.processor.name, each.row, each.outcome
    if not isinstance(outcome, Handled):
        plain = bookkeeping.in_plain_text(run.processor, each.values)
        message = "%s: what became of row %s could not be recorded: %s"
        message = bookkeeping.PLAIN if plain else message
        log(logging.WARNING, message, name, str(row.pk), error, pk=row.pk)
        return outcome, plain
    if isinstance(error, bookkeeping.UNWRITABLE):
        given, error = error, bookkeeping.invalid_done(name, error)
        error.__cause__ = given
    log_refused(run.processor, row, outcome.result, error)
    return _values_of_failure(run, each.batch, row, Failed(error, handled=True))


def _wait(run: Context, each: Unsettled, error: Exception | None) -> None:
    """Let an outcome be tried again, or give it up."""
    now = time.monotonic()
    each.error = error or each.error
    lease = run.processor.lease
    lives = now < each.since + max(PATIENCE, lease.seconds if lease is not None else 0)
    if run.heartbeat is not None:
        # The heartbeat may still have a session when this one is gone for good.
        lives = lives or error is None or is_contention(error)
        lives = lives and run.heartbeat.is_ours(each.row.pk)
    if run.limits.exceeded(0) == "signal":  # a stop waits for no lock longer than that
        lives = lives and now < each.since + PATIENCE
    if lives:
        each.again_at, each.pause = now + each.pause, min(2 * each.pause, LONGEST_PAUSE)
        return
    message = "%s: row %s could not be settled: %s"
    reason: Any = each.error or "another session has it locked"
    pk = each.row.pk
    log(logging.WARNING, message, run.processor.name, str(pk), reason, pk=pk)
    outcome = each.outcome
    if isinstance(outcome, Handled):
        error = each.error or TimeoutError("another session has the row locked")
        outcome = Failed(error, handled=True)
    _finish(run, each, outcome)


def _look_up(run: Context, missed: Sequence[Unsettled]) -> None:
    """Find out why rows were not written: they are locked, gone, or another worker's."""
    question, pks = missed[0].batch.question, [each.row.pk for each in missed]
    try:
        there = {*question.table.filter(these(pks)).values_list("pk", flat=True)}
        for each in missed:
            pk, final, expected = each.row.pk, each.outcome, _expected(run, each.row)
            ours = question.table.filter(these([pk]), fenced_by(expected))
            if pk not in there:
                _finish(run, each, final)  # the handler has deleted it
            elif ours.exists() or expected != _expected(run, each.row):
                _wait(run, each, None)  # it is locked, or its lease was renewed meanwhile
            elif (
                each.was_sent
                and question.table.filter(these([pk]), **constants_of(each.values)).exists()
            ):
                _finish(run, each, final)  # the answer was lost
            else:
                _finish(run, each, _lost(run, each))
    except Exception as error:  # noqa: BLE001  # as that of the write
        _not_written(run, [each for each in missed if each in run.unsettled], error)


def _lost(run: Context, each: Unsettled) -> Outcome | None:
    """Return the outcome of a row that no longer has this worker's mark."""
    final, name, pk = each.outcome, run.processor.name, each.row.pk
    if final is None or isinstance(final, Lost):
        return Lost(called=False)
    message = "%s: row %s was taken over before it was settled as %s%s"
    error = f": {described(final.error)}" if isinstance(final, Failed) else ""
    log(logging.WARNING, message, name, str(pk), final.name, error, pk=pk)
    return Lost()


def _finish(run: Context, each: Unsettled, final: Outcome | None) -> None:
    run.unsettled.remove(each)
    _end(run, each.row, final)


def _end(run: Context, row: Row, final: Outcome | None) -> None:
    """Count a row whose settlement is written, or will not be."""
    if run.heartbeat is not None:
        run.heartbeat.let_go(row.pk)
    if final is None:
        run.source.put_back([row.pk])
        return
    if type(final) is Handled:
        run.unproven.clear()
    run.tally(row.pk, final)
    run.source.end([row.pk], () if type(final) is Handled else [row.pk])


# --- what is written


def _decided(
    run: Context, batch: Batch, row: Row, outcome: Outcome | None
) -> tuple[Outcome | None, Values]:
    """Return the outcome to report for a row, and the values to write to it."""
    mark = batch.mark
    assert mark is not None
    unstarted = isinstance(outcome, Failed) and outcome.unstarted
    if outcome is None or unstarted or isinstance(outcome, Lost):
        return outcome, row.before  # as it was read under its lock
    if not isinstance(outcome, Handled):
        return _values_of_failure(run, batch, row, outcome)
    if row.instance.pk != row.pk:
        bookkeeping.refuse_moved(run.processor, row, batch.question.table)
    if mark.is_flip:
        return outcome, {}  # flipped before the work
    flip = run.fixed_flip or bookkeeping.flip(run.processor, row.instance, outcome.result)
    return outcome, {**mark.removed, **flip}


def _values_of_failure(
    run: Context, batch: Batch, row: Row, outcome: Outcome
) -> tuple[Outcome, Values]:
    processor, mark, retry = run.processor, batch.mark, run.processor.retry
    assert mark is not None
    is_lease = mark.lease is not None
    if isinstance(outcome, Failed) and outcome.handled and not is_lease:
        return outcome, {}  # done but not recorded: it stays in doubt, and is not repeated
    # Without retry a claimed row that failed is recorded as failed, and is not put back.
    undone = mark.undone
    if not is_lease and retry is None and isinstance(outcome, Failed):
        undone = None
    if is_lease and retry is not None and isinstance(outcome, Snoozed) and undone is not None:
        undone = {**undone, retry.attempts: row.before[retry.attempts]}
    outcome, noted = bookkeeping.notes(processor, row, outcome, undone)
    columns = set(retry.columns) if retry is not None else set()
    if not is_lease and not noted.keys() - columns:
        return outcome, noted  # still claimed, so in_doubt() still returns it
    used_up = isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp)
    if used_up and retry is not None and not noted:
        noted = {retry.attempts: row.before[retry.attempts]}
    return outcome, {**mark.removed, **by_attname(batch.question.model, {**mark.reset, **noted})}
