"""What is written to the rows of a transaction at its end: flips, and notes of failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.db import transaction

from dcl_processor import log_fields
from dcl_processor.database.contention import (
    ends_transaction,
    is_about_rows,
    is_database_error,
    is_refused_statement,
)
from dcl_processor.exceptions import AttemptsUsedUp, TransactionLost
from dcl_processor.execution.handler import Discarded, Failed, Handled, Outcome, as_exception
from dcl_processor.interrupts import ends_the_run
from dcl_processor.settlement import outcome_values, writing
from dcl_processor.values import Values, resolve

from .claim import look
from .settlement import COMMIT, ROLLBACK, Batch, Held, Settlement, Statement

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .lane import Lane

logger = logging.getLogger("dcl_processor")

#: Values, and the keys of the rows that they are written to.
Writes = list[tuple[Values, list[Any]]]


def flips(lane: Lane, batch: Batch, *, may_wait: bool = True) -> Settlement:
    """Return the end of the transaction that has the rows' locks: its flips, and the COMMIT.

    ``may_wait``: otherwise the flips are written now. Raises if a row cannot be settled; nothing of
    the transaction may be kept then.
    """
    # Race: flip without work. The work of a row whose handler raised was rolled back.
    claimed, connection = batch.claimed, lane.session.connection
    assert claimed is not None
    handled = [(held, o.result) for held, o in batch.ended if type(o) is Handled]
    writes, noted = _flips_of(lane, batch, handled), Writes()
    if len(handled) < len(batch.ended):
        noted = _notes_of(lane, batch)
    if claimed.transaction_id is None:
        # Race: flip without work. If the transaction has ended, the lock and the work are lost, and
        # the next transaction would contain the flip alone. No user code runs between this and the
        # flip. Elsewhere each flip has the transaction's id.
        lane.session.check_for_the_last_time()
    is_kept = not connection.needs_rollback and (handled or _keeps_something(batch, noted))
    end = COMMIT if is_kept else ROLLBACK
    if may_wait and not noted and (later := _later(lane, batch, writes)) is not None:
        return Settlement(batch, (*later, end))
    _write_now(lane, batch, writes, noted)
    # The flip could not be verified beforehand, or that proves nothing for these rows.
    if handled and lane.run.looks_after_flips:
        pks = [held.pk for held, _ in handled]
        writing.refuse_pending(lane.processor, batch.question, pks)
    if connection.run_on_commit:
        _keep_callbacks_apart(connection)
    return Settlement(batch, (end,))


def _keeps_something(batch: Batch, noted: Writes) -> bool:
    """Return whether the transaction of rows that were not handled is to be committed."""
    # No generators: an interrupt at the end of one that is left early would be lost.
    kept = [outcome for _, outcome in batch.ended if getattr(outcome, "kept", False)]
    return bool(kept or [values for values, _ in noted if values])


def fixed_flip(processor: Definition[Any]) -> Values | None:
    """Return the flip if it is the same for all rows; ``None``: it depends on the row."""
    done = processor.done if processor._has_fixed_flip else None
    if done is None or any(map(callable, done.values())):
        return None
    return outcome_values.with_cleared_retry(processor, done)


def flip_of(lane: Lane, held: Held, result: Any) -> Values:
    """Return the values that take a handled row out of pending; the callables are called."""
    if lane.fixed_flip is not None:
        return lane.fixed_flip
    return resolve(outcome_values.flip(lane.processor, held.row, result))


def _flips_of(lane: Lane, batch: Batch, handled: Sequence[tuple[Held, Any]]) -> Writes:
    """Return what to write to the handled rows; rows with the same values are one write."""
    processor, question = lane.processor, batch.question
    moved = {held.pk: held.row for held, _ in handled if held.row.pk != held.pk}
    if moved:
        writing.refuse_moved(question, moved, processor)
    if handled and (lane.fixed_flip is not None or len(handled) == 1):
        values = lane.fixed_flip or flip_of(lane, *handled[0])
        return [(values, [held.pk for held, _ in handled])]
    return writing.group(
        {h.pk: outcome_values.flip(processor, h.row, result) for h, result in handled}
    )


def _notes_of(lane: Lane, batch: Batch) -> Writes:
    """Return what to write to the rows that were not handled, and record their outcomes."""
    noted: Writes = []
    for place, (held, outcome) in enumerate(batch.ended):
        if outcome is not None and type(outcome) is not Handled:
            final, values = noted_of(lane, held, outcome)
            batch.ended[place] = held, final
            noted.append((values, [held.pk]))
    return noted


def noted_of(
    lane: Lane, held: Held, outcome: Outcome, **undone: Values | None
) -> tuple[Outcome, Values]:
    """Return the outcome to report for a row that was not handled, and what to write to it.

    ``undone``: as for ``notes()``.
    """
    attempt, most = held.attempt, held.most
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        attempt = most or attempt  # no handler was called
    final, values = outcome_values.notes(
        lane.processor, held.row, outcome, attempt=attempt, most=most, **undone
    )
    return final, resolve(values)


def _later(lane: Lane, batch: Batch, writes: Writes) -> list[Statement] | None:
    """Return the flips as statements of the message with the COMMIT, each of which may fail.

    ``None``: one of them has to be written, and looked at, before the COMMIT.
    """
    claimed, session, connection = batch.claimed, lane.session, lane.session.connection
    assert claimed is not None
    if claimed.transaction_id is None or not session.is_open or connection.run_on_commit:
        return None
    if connection.needs_rollback:
        return None if writes else []
    if not lane.run.flips_may_wait:
        return None
    found = writing.checked_flips(batch.question, writes, claimed.transaction_id)
    if found is None:
        return None
    later = [Statement(*each) for each in found]
    if lane.run.looks_after_flips and writes:
        later.append(look(batch.question, [pk for _, pks in writes for pk in pks]))
    return later


def _write_now(lane: Lane, batch: Batch, writes: Writes, noted: Writes) -> None:
    processor, question, claimed = lane.processor, batch.question, batch.claimed
    assert claimed is not None
    # Django refuses queries in a transaction that is to be rolled back, and nothing of it is kept.
    is_kept = not lane.session.connection.needs_rollback
    fence = claimed.transaction_id
    if fence is not None and is_kept and not [each for each, _ in [*writes, *noted] if each]:
        writing.refuse_another(question.using, fence)
    for values, pks in writes:
        writing.write(question, pks, values, processor, fence, is_flip=True)
    if some := [(values, pks) for values, pks in noted if values]:
        _write_notes(lane, batch, some)


def write_notes(lane: Lane, batch: Batch, held: Held, outcome: Outcome) -> Outcome:
    """Write what is written to a row that was not handled; return the outcome to report."""
    final, values = noted_of(lane, held, outcome)
    if values:
        _write_notes(lane, batch, [(values, [held.pk])])
    return final


def _write_notes(lane: Lane, batch: Batch, noted: Writes) -> None:
    """Record failures, each with less of what belongs to it if the database refuses that.

    Count and time are what matters: without them the row would be tried in every run. What the
    database does not record now is tried after the batch, whose other rows are done.
    """
    if len(noted) > 1 and _is_written(lane, batch, noted) is None:
        return
    ended = {held.pk: (held, outcome) for held, outcome in batch.ended}
    for values, pks in noted:
        refused: Exception | None = None
        error: Exception | None = None
        some = values
        for some in reduced(lane.processor, values, *ended.get(pks[0], (None, None))):
            error = _is_written(lane, batch, [(some, pks)])
            refused = refused or error
            if error is None or not _is_of_values(error):
                break
        if error is not None and len(batch.rows) > 1:
            batch.unrecorded.update(pks)
        elif error is not None:
            raise refused or error
        elif refused is not None:
            tell_of_rest(lane.processor, pks, values.keys() - some.keys(), refused)


def _is_written(lane: Lane, batch: Batch, noted: Writes) -> Exception | None:
    """Write notes; return the error if none are written, and the other rows' work is kept."""
    assert batch.claimed is not None
    fence = batch.claimed.transaction_id
    try:
        with transaction.atomic(using=batch.question.using):
            for values, pks in noted:
                writing.write(batch.question, pks, values, lane.processor, fence)
            if not batch.started and lane.session.connection.vendor == "postgresql":
                # Alone in its transaction: what the COMMIT would refuse is refused here.
                lane.session.connection.check_constraints()
    except Exception as error:
        is_kept = not (lane.session.connection.needs_rollback or ends_transaction(error))
        may_wait = is_kept and len(batch.rows) > 1 and is_database_error(error)
        if may_wait or _is_of_values(error):
            return error
        raise
    return None


def _is_of_values(error: Exception) -> bool:
    if is_database_error(error):
        return is_about_rows(error) or is_refused_statement(error)
    return not isinstance(error, TransactionLost)


def reduced(
    processor: Definition[Any],
    values: Values,
    held: Held | None,
    outcome: Outcome | None,
    kept: Collection[str] = (),
) -> Iterator[Values]:
    """Yield the values, and then less of them: with a plain text, without, the count alone.

    ``held``, ``outcome``: whose they are. ``kept``: columns that are always written.
    """
    yield values
    retry = processor.retry
    if retry is None:
        return
    text, count, time = (
        each or "" for each in (retry.last_error, retry.attempts, retry.next_attempt_at)
    )
    own = {*retry.columns, *kept}
    alone = {name: each for name, each in values.items() if name in own}
    is_last = isinstance(outcome, Discarded) or getattr(outcome, "again_in", 0.0) is None
    if is_last and count in alone and held is not None and held.most is not None:
        # Without its dead letter nothing else shows that it is given up.
        alone[count] = max(alone[count], held.most)
    for some in (values, alone):
        if isinstance(some.get(text), str):
            yield {**some, text: some[text].encode("ascii", "replace").decode()}
        yield {name: each for name, each in some.items() if name != text}
        yield {name: each for name, each in some.items() if name not in {text, time}}


def tell_of_rest(
    processor: Definition[Any], pks: Sequence[Any], left_out: Collection[str], error: Exception
) -> None:
    """Log which values of a failure could not be stored."""
    name = processor.name
    what = f"without {', '.join(sorted(left_out))}" if left_out else "with a plain text"
    message = "%s: the failure of row %s was recorded %s, because the database refused it: %s"
    extra = log_fields.fields(name, pk=pks[0], **log_fields.error_fields(error))
    log_fields.log(logger, logging.WARNING, message, name, str(pks[0]), what, error, extra=extra)


def _keep_callbacks_apart(connection: Any) -> None:
    """Make the on_commit() callbacks robust, as ``on_commit(robust=True)`` does.

    The rows are settled when the callbacks run. A callback that raises would make Django drop the
    later ones, and would look like a failed commit; a robust one makes Django log the error.
    """
    connection.run_on_commit = [
        (sids, _raising_exceptions(call), True) for sids, call, _ in connection.run_on_commit
    ]


def _raising_exceptions(call: Callable[[], Any]) -> Callable[[], Any]:
    """Turn ``sys.exit()`` and the like into an error that Django logs, as rows are committed."""

    @wraps(call)
    def calling() -> None:
        try:
            call()
        except BaseException as error:
            if ends_the_run(error):
                raise
            raise as_exception(error)  # noqa: B904  # which says itself where it comes from

    # Django logs the callback's name, and a callable object may have none.
    calling.__qualname__ = getattr(call, "__qualname__", repr(call))
    return calling
