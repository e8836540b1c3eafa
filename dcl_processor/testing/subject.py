"""The processor as a test has it: its question, and its handler with what the test notes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.candidates.question import Question, ask
from dcl_processor.exceptions import InvalidOption
from dcl_processor.interrupts import Interruption
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

M = TypeVar("M", bound=Model)
P = TypeVar("P", bound=BatchProcessor[Any])
Around = Callable[[Sequence[Any]], AbstractContextManager[Any]]


def question_of(processor: BatchProcessor[M], using: str | None) -> Question[M]:
    """Return the user's question, with the processor's own conditions for a row."""
    question: Question[M] = ask(
        processor.pending, label=processor.name, using=using or processor.using, due=processor._due
    )
    return question


def check_row(processor: BatchProcessor[Any], question: Question[Any], row: Any) -> None:
    """Raise ``InvalidOption`` unless the row is of the processor's model."""
    if not isinstance(row, question.model):
        raise InvalidOption(
            f"{processor.name}: expected a row of {question.model._meta.label}, got {row!r}."
        )


class HandlerAsserted(Interruption):
    """Carries a handler's ``AssertionError`` past the code that would make it a row's failure."""

    def __init__(self, error: AssertionError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def asserting() -> Iterator[None]:
    """Let an ``AssertionError`` end the run, because it fails the test and not a row."""
    try:
        yield
    except AssertionError as error:
        raise HandlerAsserted(error) from error


def raise_asserted(reports: Sequence[Report]) -> None:
    """Raise an ``AssertionError`` that code beside the handler raised, such as ``get_done()``."""
    for failure in (failure for report in reports for failure in report.failures):
        for error in (failure.error, failure.error.__cause__):
            if isinstance(error, AssertionError):
                # The run has released the frames, and kept the traceback as text.
                error.add_note(failure.traceback)
                raise error


def watched(processor: P, around: Around) -> P:
    """Return a copy of the processor; ``around(keys)`` is entered around each handler call."""
    name = "process_batch" if processor._handles_batches else "process"
    handle = getattr(processor, name)

    def keys(given: Any) -> list[Any]:
        return [row.pk for row in given] if processor._handles_batches else [given.pk]

    @functools.wraps(handle)
    def call(given: Any, /, *arguments: Any) -> Any:
        with around(keys(given)):
            return handle(given, *arguments)

    @functools.wraps(handle)
    async def call_on_the_loop(given: Any, /, *arguments: Any) -> Any:
        with around(keys(given)):
            return await handle(given, *arguments)

    twin = copy.copy(processor)
    vars(twin)[name] = call_on_the_loop if processor._is_async else call
    return twin
