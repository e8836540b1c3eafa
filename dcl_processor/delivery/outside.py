"""Work with no transaction open, and settle each row if its mark is still there."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from django.db.models import Model

from dcl_processor.database.connection import is_connected
from dcl_processor.exceptions import AttemptsUsedUp, ProcessorError
from dcl_processor.execution.handler import Failed, Lost, Outcome, execute
from dcl_processor.execution.leftover import Leftover

from .batch import Batch
from .marks import Mark
from .settling import put_back, settle, settle_ended

if TYPE_CHECKING:
    from dcl_processor.execution.event_loop import EventLoop
    from dcl_processor.execution.resource import Opened

M = TypeVar("M", bound=Model)

logger = logging.getLogger("dcl_processor")


@contextmanager
def cleared_up(batch: Batch[M], mark: Mark) -> Iterator[None]:
    """Put back the rows that were marked and not handled, however the block ends.

    The block includes the claim, because an interrupt may come as soon as it is committed.
    """
    if Leftover(batch.question.using).end():
        name = batch.processor.name
        logger.warning("%s: a transaction that was left open was rolled back", name)
    try:
        yield
    finally:
        _clear_up(batch, mark)


def work_and_settle(batch: Batch[M], mark: Mark) -> Generator[int, None, None]:
    """Handle the claimed rows; each is settled as soon as its outcome is known."""
    _refuse_not_kept(batch, mark)
    refused: list[tuple[Any, Outcome]] = []
    rows = _startable(batch, mark, refused)
    if batch.run.event_loop is None:
        _work(batch, mark, rows)
    else:
        yield from _work_on_loop(batch, mark, rows, batch.run.event_loop)
    for pk, outcome in refused:
        settle(batch, mark, pk, outcome)


def _refuse_not_kept(batch: Batch[M], mark: Mark) -> None:
    """Put back the rows in which a column does not contain what the claim wrote to it."""
    for pk, column in batch.not_kept.items():
        batch.outcomes[pk] = Failed(
            ProcessorError(
                f"{batch.processor.name}: expected {column!r} of row {pk} to contain what the "
                "claim wrote, got another value back, and did not call the handler; look for a "
                "trigger that keeps the old value."
            )
        )
        put_back(batch, mark, pk)


def _work(batch: Batch[M], mark: Mark, rows: Iterator[tuple[Any, M]]) -> None:
    run, processor = batch.run, batch.processor
    for pk, row in rows:
        arguments = run.resource.arguments()
        with Leftover(batch.question.using) as leftover:
            # As late as possible, because AT_MOST_ONCE does not put a started row back.
            batch.started.add(pk)
            outcome = execute(processor, row, arguments)
        outcome = leftover.judge(outcome)
        if isinstance(outcome, Failed):
            run.resource.worn()
        batch.ended[pk] = outcome
        settle_ended(batch, mark)


def _work_on_loop(
    batch: Batch[M], mark: Mark, rows: Iterator[tuple[Any, M]], loop: EventLoop
) -> Generator[int, None, None]:
    """Handle the rows on the loop; yield to wait until a handler of any batch ends."""
    under_way: set[Any] = set()
    coming = True
    with batch.run.resource.lent() as lent:
        try:
            while coming or under_way:
                _take_ended(batch, mark, loop, under_way, lent)
                while coming and loop.free:
                    if coming := (found := next(rows, None)) is not None:
                        pk, row = found
                        batch.started.add(pk)
                        under_way.add(pk)
                        loop.start(batch.processor, pk, row, lent.arguments)
                if coming or under_way:
                    yield len(batch.rows) - len(batch.started) if coming else 0
        finally:
            # Before the resource that they use is closed, and before the other rows are put back.
            if under_way:
                batch.ended.update(loop.cancel(under_way))


def _take_ended(
    batch: Batch[M], mark: Mark, loop: EventLoop, under_way: set[Any], lent: Opened
) -> None:
    while ended := loop.ended(under_way):
        # Recorded here before the loop forgets them, because an interrupt may come in between.
        batch.ended.update(ended)
        loop.forget(ended)
        under_way.difference_update(ended)
        lent.is_worn |= any(isinstance(each, Failed) for each in ended.values())
        settle_ended(batch, mark)


def _startable(
    batch: Batch[M], mark: Mark, refused: list[tuple[Any, Outcome]]
) -> Iterator[tuple[Any, M]]:
    """Yield each row when its handler may start; add the rows that may not to ``refused``."""
    run, retry = batch.run, batch.processor.retry
    for pk, row in batch.rows.items():
        if pk in batch.not_kept:
            continue
        # A handler may have lost the session. The next handler must not begin with a dead
        # connection, and rows that cannot start are put back.
        if not run.may_start(batch.outcomes) or not is_connected(batch.question.using):
            return
        if retry and batch.attempts[pk] > retry.max_attempts:
            refused.append((pk, Failed(AttemptsUsedUp(retry.max_attempts))))
        elif not mark.is_ours(pk):
            refused.append((pk, Lost(called=False)))
        else:
            yield pk, row


def _clear_up(batch: Batch[M], mark: Mark) -> None:
    """Settle rows that ended during an interrupt, and put back rows that were not started."""
    settle_ended(batch, mark)
    left = [pk for pk in mark.rows if pk not in batch.outcomes]
    for pk in left:
        if mark.may_repeat or pk not in batch.started:
            put_back(batch, mark, pk)
