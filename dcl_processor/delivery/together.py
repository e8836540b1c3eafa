"""Settle in one statement the rows whose asynchronous handlers ended together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.database.contention import is_contention, is_database_error
from dcl_processor.execution.handler import Handled, ends_the_run
from dcl_processor.locking.waiting import settlement_transaction
from dcl_processor.settlement import flip as flips
from dcl_processor.settlement import grouping, writing

from .batch import Batch
from .compare_and_set import Guard, write_all
from .marks import Mark

M = TypeVar("M", bound=Model)
Values = Mapping[str, Any]

logger = logging.getLogger("dcl_processor")


class NotAllOursError(Exception):
    """A row was taken over, or is gone; settling each row alone finds out which one."""


def settle(batch: Batch[M], mark: Mark) -> None:
    """Flip the ended rows that have the same flip; leave the others in ``batch.ended``.

    Any error rolls back all of them; settling each row alone then finds the one to blame.
    """
    for values, guard, pks in _alike(batch, mark):
        # Recorded before the write: if the answer is lost, the rows may still have been written.
        batch.unknown.update(pks)
        session = connections[batch.question.using].connection
        try:
            _flip(batch, pks, values, guard)
        except NotAllOursError:
            batch.unknown.difference_update(pks)
        except Exception as error:
            if ends_the_run(error):
                raise
            if not is_database_error(error) or _was_answered(
                error, batch.question.using, since=session
            ):
                batch.unknown.difference_update(pks)
            logger.debug("%s: settling rows one by one: %s", batch.processor.name, error)
        else:
            batch.unknown.difference_update(pks)
            for pk in pks:
                batch.outcomes[pk] = batch.ended.pop(pk)
                del batch.flips[pk]


def flip(batch: Batch[M], mark: Mark, pk: Any, outcome: Handled) -> Values:
    """Return the values that take a handled row out of pending, and remove its mark."""
    known = batch.flips.pop(pk, None)
    if known is not None:
        return known
    return {**mark.removed, **flips.flip(batch.processor, batch.rows[pk], outcome.result)}


def _alike(batch: Batch[M], mark: Mark) -> list[tuple[Values, Guard, list[Any]]]:
    """Return the values, the guard and the keys of rows that one statement can write."""
    if not mark.may_repeat and batch.processor.claim is None:
        return []  # flipped before the work
    for pk, outcome in batch.ended.items():
        if isinstance(outcome, Handled):
            try:
                batch.flips[pk] = flip(batch, mark, pk, outcome)
            except BaseException as error:
                if ends_the_run(error):
                    raise
                # Settling that row alone raises the error again, as the row's failure.
    alike: list[tuple[Values, Guard, list[Any]]] = []
    for values, pks in grouping.group(batch.flips):
        # The callables were called for these rows, and must not be called again.
        batch.flips.update(dict.fromkeys(pks, values))
        if len(pks) > 1:
            guards = {pk: mark.let_go(pk) for pk in pks}
            several = [(g, some) for g, some in grouping.group(guards) if len(some) > 1]
            alike += [(values, guard, some) for guard, some in several]
    return alike


def _flip(batch: Batch[M], pks: Sequence[Any], values: Values, guard: Guard) -> None:
    question, processor = batch.question, batch.processor
    with settlement_transaction(question.using):
        # Race: lost lease that writes. A row that another worker has taken over does not match.
        if write_all(question, pks, guard, values) != len(pks):
            raise NotAllOursError
        if "done" in batch.run.doubtful:
            writing.refuse_pending(processor, question, pks)


def _was_answered(error: Exception, using: str, *, since: Any) -> bool:
    """Return whether the database reported that nothing was written.

    ``since``: the driver's connection as it was before the error. Django itself reconnects if the
    ROLLBACK after a COMMIT without an answer finds that the session is gone.
    """
    connection: Any = connections[using]
    return is_contention(error) or (connection.connection is since and connection.is_usable())
