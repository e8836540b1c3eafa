"""Work with no transaction open, and settle each row if its mark is still there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import Model, QuerySet

from . import settlement
from .batch import Batch
from .exceptions import AttemptsUsedUp
from .execution import Failed, Handled, Lost, Outcome, execute
from .marks import Mark

M = TypeVar("M", bound=Model)


def work_and_settle(batch: Batch[M], mark: Mark) -> None:
    """Handle the claimed rows; each is settled as soon as its outcome is known."""
    started: set[Any] = set()
    try:
        for pk, outcome in _work(batch, mark, started):
            batch.outcomes[pk] = outcome
            batch.outcomes[pk] = _settle(batch, mark, pk, outcome)
    finally:
        # An orderly stop, or an interrupt: what was not started is as if it had not been claimed.
        left = batch.rows.keys() - batch.outcomes.keys()
        for pk in left if mark.may_repeat else left - started:
            _put_back(batch, mark, pk)


def _work(batch: Batch[M], mark: Mark, started: set[Any]) -> Iterator[tuple[Any, Outcome]]:
    run, processor = batch.run, batch.processor
    refused: list[tuple[Any, Outcome]] = []
    rows = _startable(batch, mark, started, refused)
    if run.event_loop is not None:
        yield from run.event_loop.handle(processor, rows, run.resource.arguments)
    else:
        for pk, row in rows:
            outcome = execute(processor, row, run.resource.arguments())
            if isinstance(outcome, Failed):
                run.resource.worn()
            yield pk, outcome
    yield from refused


def _startable(
    batch: Batch[M], mark: Mark, started: set[Any], refused: list[tuple[Any, Outcome]]
) -> Iterator[tuple[Any, M]]:
    """Yield the rows whose handlers may start, each when it may; put the others aside."""
    run, retry = batch.run, batch.processor.retry
    for pk, row in batch.rows.items():
        # What cannot be put back has to be handled, now that it is claimed.
        if mark.undone is not None and not run.may_start(batch.outcomes):
            return
        if retry and batch.attempts[pk] > retry.max_attempts:
            refused.append((pk, Failed(AttemptsUsedUp(retry.max_attempts))))
        elif not mark.is_ours(pk):
            refused.append((pk, Lost()))
        else:
            started.add(pk)
            yield pk, row


def _settle(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> Outcome:
    """Write the outcome if the row is still ours, and return what became of it."""
    guard = mark.let_go(pk)
    if isinstance(outcome, Lost):
        return outcome
    try:
        outcome, values = _values(batch, mark, pk, outcome)
        if not values or _written(batch, pk, guard, values, outcome):
            return outcome
        table: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
        # Looked up, not guessed: the handler may have deleted its row.
        return Lost() if table.filter(pk=pk).exists() else outcome
    except Exception as error:  # noqa: BLE001  # the work is done, the settlement is not
        return Failed(error, handled=isinstance(outcome, Handled))


def _values(
    batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome
) -> tuple[Outcome, Mapping[str, Any]]:
    processor = batch.processor
    if isinstance(outcome, Handled) and not mark.may_repeat and processor.claim is None:
        return outcome, {}  # flipped before the work
    if isinstance(outcome, Handled):
        try:
            return outcome, {**mark.removed, **processor.get_done(batch.rows[pk], outcome.result)}
        except Exception as error:  # noqa: BLE001  # the row's own failure
            outcome = Failed(error, handled=True)
    outcome, noted = settlement.notes(batch, pk, outcome, undone=mark.undone)
    return outcome, {**mark.removed, **noted}


def _written(
    batch: Batch[M], pk: Any, guard: Any, values: Mapping[str, Any], outcome: Outcome
) -> bool:
    question, processor = batch.question, batch.processor
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    resolved = settlement.resolve(values)
    verify = isinstance(outcome, Handled) and not processor._has_fixed_flip
    if not verify or processor.repeats:
        return bool(table.filter(guard, pk=pk).update(**resolved))
    with transaction.atomic(using=question.using):
        written = table.filter(guard, pk=pk).update(**resolved)
        settlement.refuse_pending(processor, question, [pk])
    return bool(written)


def _put_back(batch: Batch[M], mark: Mark, pk: Any) -> None:
    guard = mark.let_go(pk)
    if mark.undone is not None:
        table: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
        table.filter(guard, pk=pk).update(**settlement.resolve(mark.undone))
