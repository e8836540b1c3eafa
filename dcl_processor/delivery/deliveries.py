"""The possible orders of lock, work, flip and commit.

Each of the three functions is one row of the crash table: the place where its transaction ends
shows what a killed process leaves behind. To add a delivery, add its function here, and its line
of rules to ``definition/kinds.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.definition.kinds import Delivery
from dcl_processor.exceptions import Unsupported
from dcl_processor.locking.claiming import Claimed, claim
from dcl_processor.locking.key_lock import claim_in_turn
from dcl_processor.locking.row_transactions import NotSentError
from dcl_processor.locking.transaction_guard import TransactionGuard
from dcl_processor.settlement.writing import explained

from . import after_commit, in_transaction
from .batch import Batch
from .claim_and_commit import claim_and_commit
from .marks import claim_mark, lease_mark
from .recovery import recover
from .settle_later import settlement_answered

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

M = TypeVar("M", bound=Model)


def transactional(batch: Batch[M]) -> None:
    """Lock and check again → work → flip → commit."""
    # Race: work without flip. Both are in one transaction, which commits both or neither.
    with batch.context.transactions.using(batch.question.using):
        claim_rows = claim if batch.wanted.key is None else claim_in_turn
        claimed = claim_rows(batch.question, batch.wanted, batch.context.transactions)
        batch.take(claimed)
        # A query without rows may not have been sent at all, and then no transaction is open.
        if batch.rows:
            batch.rehearse()
            with TransactionGuard(batch.question.using, claimed.transaction_id) as guard:
                in_transaction.handle(batch, guard)
                in_transaction.settle(batch, guard)


def at_most_once(batch: Batch[M]) -> None:
    """Lock and check again → claim, or flip → commit → work → settle, if the claim still stands."""
    claim_and_commit(batch, claim_mark(batch))
    after_commit.handle_and_settle(batch)


def at_least_once(batch: Batch[M]) -> None:
    """Lock and check again → lease, attempt + 1 → commit → work → settle, if still leased."""
    claim_and_commit(batch, lease_mark(batch))
    after_commit.handle_and_settle(batch)


#: The function of each delivery, which has its rules in ``definition/kinds.py``.
DELIVERIES: dict[str, Callable[[Batch[Any]], None]] = {
    Delivery.TRANSACTIONAL: transactional,
    Delivery.AT_MOST_ONCE: at_most_once,
    Delivery.AT_LEAST_ONCE: at_least_once,
}


def refuse_unknown(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` unless the processor's delivery has a function."""
    if processor.delivery not in DELIVERIES:
        raise Unsupported(
            f"{processor.name}: expected a delivery with a function, one of "
            f"{', '.join(map(str, DELIVERIES))}, got {processor.delivery!r}, which has only rules; "
            "add its function to DELIVERIES in dcl_processor/engine/deliveries.py."
        )


def deliver(batch: Batch[M]) -> None:
    """Claim, handle and settle a batch; if its handlers are asynchronous, only start them.

    Does nothing if the handlers' resource cannot be opened.
    """
    context = batch.context
    if not context.resource.is_open:
        context.transactions.confirm()
    if not context.resource.ready():
        return
    session = connections[batch.question.using].connection
    goes_on = False
    try:
        DELIVERIES[context.processor.delivery](batch)
        goes_on = batch.handlers is not None and not batch.is_over
    except NotSentError:
        # The batch that waited is counted first, and its outcome may end the run. If it does not,
        # the run claims these rows again.
        batch.take(Claimed({}, {}))
    except BaseException as error:
        if batch.is_unconfirmed:
            raise  # an interrupt: nothing was rolled back
        recover(batch, error, session=session)
    finally:
        if batch.claimed_at is not None and not batch.is_unconfirmed:
            batch.note_unlocked()
        if not goes_on:
            finish(batch)


def confirmed(batch: Batch[Any], session: Any, error: BaseException | None) -> None:
    """Complete a batch whose waiting statements were answered.

    ``session``: the driver's connection that it waited on; ``error``: the error that rolled the
    statements back, if any.
    """
    hand_over, interrupt = batch.context.on_confirmed, None
    if batch.claimed_at is not None:
        batch.note_unlocked()
    try:
        if batch.marked is not None:
            settlement_answered(batch, session, error)
        elif error is not None:
            raised = explained(error, batch.processor, list(batch.rows))
            if raised is not error:
                raised.__cause__ = error
            recover(batch, raised, session=session, waited=True)
    except BaseException as raised:
        if hand_over is None:
            raise
        interrupt = raised
    if hand_over is not None:
        hand_over(batch, interrupt)


def finish(batch: Batch[M]) -> None:
    """Clear up after a batch, however it ended."""
    if batch.handlers is not None:
        batch.handlers.close()
        batch.handlers = None  # or they would refer to each other
    if batch.marked is not None:
        after_commit.clear_up(batch)
    loop, in_flight = batch.context.event_loop, batch.context.in_flight
    if loop is not None and in_flight.notes.using and (rows := loop.rows_under_way):
        in_flight.note(rows)  # of the handlers of other batches
    else:
        in_flight.forget()
