"""Asserts that rows are handled once, however the processor is run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db.models import Model

from dcl_processor.errors import represent
from dcl_processor.processor import BatchProcessor

from .handlers import Around, HandlerAsserted, asserting, wrapped
from .questions import check_rows, pending_keys, question_of


class assert_processed_once:  # noqa: N801  # used like a function, as pytest.raises is
    """Assert that in the block each row is handled exactly once, and leaves pending.

    Without ``rows``, it checks the rows that are pending when the block begins. It counts all
    handler calls of this process: by a run, a ``race()``, a command, several threads. Until the
    block's end, a handler that counts replaces the processor's handler.

    Raises ``AssertionError``, which names each row that was not, and why. A handler's own
    ``AssertionError`` is raised unchanged.
    """

    def __init__(
        self, processor: BatchProcessor[Any], *rows: Model, using: str | None = None
    ) -> None:
        self._processor = processor
        self._using = using
        self._rows = rows
        self._lock = threading.Lock()
        self._calls: Counter[Any] = Counter()
        self._errors: dict[Any, Exception] = {}
        self._watching = ExitStack()

    def __enter__(self) -> None:
        question = question_of(self._processor, self._using)
        check_rows(self._processor, question, self._rows)
        self._pks = [row.pk for row in self._rows] or pending_keys(question)
        if not self._pks:
            raise AssertionError(
                f"{self._processor.name}: expected pending rows, got none, so nothing would be "
                "tested; create rows before the block."
            )
        self._watching.enter_context(_replaced(self._processor, self._around))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watching.close()
        if isinstance(error, HandlerAsserted):
            asserted = error.error
            raise asserted from asserted.__cause__  # and not from the carrier
        if error is None:
            self._judge()

    def _judge(self) -> None:
        question = question_of(self._processor, self._using)
        still = set() if self._processor.repeats else set(pending_keys(question, self._pks))
        wrong = [
            said for pk in self._pks if (said := self._said(pk, still_pending=pk in still)) != ""
        ]
        if wrong:
            expected = f"each of {len(self._pks)} rows" if len(self._pks) > 1 else "the row"
            first = next((e for e in self._errors.values()), None)
            named = [*wrong[:10], f"{len(wrong) - 10} more"] if len(wrong) > 10 else wrong
            raise AssertionError(
                f"{self._processor.name}: expected {expected} to be handled once and to leave "
                f"pending, got {'; '.join(named)}."
            ) from first

    def _said(self, pk: Any, *, still_pending: bool) -> str:
        calls, error = self._calls[pk], self._errors.get(pk)
        if calls == 1 and not still_pending and error is None:
            return ""
        times = {0: "not handled", 1: "handled once"}.get(calls, f"handled {calls} times")
        raised = f", which raised {represent(error)}" if error else ""
        return f"row {pk} {times}{raised}{', and still pending' if still_pending else ''}"

    @contextmanager
    def _around(self, pks: Sequence[Any]) -> Iterator[None]:
        with self._lock:
            self._calls.update(pks)
        try:
            with asserting():
                yield
        except Exception as error:
            with self._lock:
                self._errors.update(dict.fromkeys(pks, error))
            raise


@contextmanager
def _replaced(processor: BatchProcessor[Any], around: Around) -> Iterator[None]:
    before = dict(vars(processor))
    handler = wrapped(processor, around)
    vars(processor).update(handler)
    try:
        yield
    finally:
        for name in handler:
            if name in before:
                vars(processor)[name] = before[name]
            else:
                del vars(processor)[name]
