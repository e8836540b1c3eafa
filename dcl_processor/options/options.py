"""What the user writes, as options and hooks; ``BatchProcessor`` adds the methods that use it."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from typing import Any, Generic, TypeVar

from django.apps import apps
from django.db.models import Model, Q, QuerySet
from django.db.models.expressions import Combinable

from dcl_processor.options.kinds import Delivery, Lease
from dcl_processor.options.retry import Retry
from dcl_processor.report.observer import Gate, Observer

M = TypeVar("M", bound=Model)

#: What ``process_batch()`` returns: nothing, or results in the order of the rows.
Results = Sequence[Any] | None


class DefaultName:
    """Gives "<label of the app the code is in>.<name>", once the apps are known."""

    def __get__(self, processor: Definition[Any] | None, owner: type) -> str:
        if processor is None:
            return owner.__name__
        module = processor.__module__
        label = _app_label(module) if apps.apps_ready else module
        return f"{label}.{processor.__name__}"


@functools.cache
def _app_label(module: str) -> str:
    config = apps.get_containing_app_config(module)
    return config.label if config else module


class Identity:
    """Stands for a processor and its copies.

    ``verified``: the models on whose rows this process has tried the flips; ``unproven``: those of
    them to which no flip was written yet.
    """

    def __init__(self) -> None:
        self.verified: set[type[Model]] = set()
        self.unproven: set[type[Model]] = set()


class Definition(Generic[M]):
    """The options and hooks of a ``BatchProcessor``; the engine reads only these."""

    name: str = DefaultName()  # type: ignore[assignment]  # a descriptor that gives a str
    delivery: Delivery = Delivery.TRANSACTIONAL
    batch_size: int = 1
    done: Mapping[str, Any] | None = None
    failed: Mapping[str, Any] | None = None
    reset: Mapping[str, Any] | None = None
    retry: Retry | None = None
    max_consecutive_failures: int | None = None
    max_pending: int | None = None
    claim: Mapping[str, Any] | None = None
    claimed_at: str | None = None
    lease: Lease | None = None
    concurrency: int = 1
    handler_timeout: float | timedelta | None = None
    max_in_flight: int | None = None
    group_by: str | None = None
    in_order: bool = False
    max_per_group: int | None = None
    fair_by: str | None = None
    rate: float | None = None
    pending_since: str | Combinable | None = None
    using: str | None = None
    gates: Sequence[Gate] = ()
    observers: Sequence[Observer] = ()

    __name__: str
    _identity: Identity

    def pending(self) -> QuerySet[M]:
        """Return the rows that wait to be handled; called again for every window of rows."""
        raise NotImplementedError

    def process(self, row: M, /, *arguments: Any, **_: Any) -> Any:
        """Handle one row, which is locked and was pending when it was locked.

        The second argument is the ``resource()``, if there is one. The return value is passed to
        ``get_done()``. If it raises, the row fails; an exception that is returned, such as
        ``Snooze`` or ``Discard``, is taken as raised.
        """
        raise NotImplementedError

    def process_batch(
        self, rows: Sequence[M], /, *arguments: Any, **_: Any
    ) -> Results | Awaitable[Results]:
        """Handle the rows of a batch together, instead of ``process()`` for each.

        Returns ``None``, or the results in the order of the rows; an exception among them is the
        outcome of its row. If the method raises, it is called again for each row alone.
        """
        raise NotImplementedError

    def resource(self) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None:
        """Return what the handler needs open, such as a connection to a mail server.

        It is opened before the first row, once per thread, and passed to the handler as its second
        argument. It is reopened after a row failed, and closed at the end.
        """
        return None

    def get_failed(self, row: M, error: Exception, /) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what is written to a row that is given up on: the dead letter."""
        return self.failed or {}

    def get_done(self, row: M, result: Any, /) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the flip for a row, from the handler's result; it may take the row alone."""
        return self.done or {}

    # --- what the engine asks

    @property
    def _label(self) -> str:
        """The user's name for the processor; its option ``name`` may be what is wrong."""
        handler = vars(self).get("process")
        return getattr(handler, "__name__", None) or type(self).__name__

    def _writes(self, hook: str) -> bool:
        """Whether the user has written this method."""
        return getattr(getattr(self, hook), "__func__", None) is not getattr(Definition, hook)

    @functools.cached_property
    def _has_fixed_flip(self) -> bool:
        """Whether the flip is ``done``, whatever the row and the handler's result."""
        return self.done is not None and not self._writes("get_done")

    @functools.cached_property
    def _flip_needs_result(self) -> bool:
        return not self._has_fixed_flip and takes(self.get_done, None, None)

    @functools.cached_property
    def _handles_batches(self) -> bool:
        return self._writes("process_batch")

    @functools.cached_property
    def _is_async(self) -> bool:
        handler = self.process_batch if self._handles_batches else self.process
        return inspect.iscoroutinefunction(handler)

    @property
    def most_of_a_key(self) -> int | None:
        """The rows of one key that may be in flight; ``None``: any number."""
        return None if self.group_by is None else self.max_per_group or 1

    @property
    def is_transactional(self) -> bool:
        return self.delivery == Delivery.TRANSACTIONAL

    @property
    def _has_dead_letter(self) -> bool:
        return self.failed is not None or self._writes("get_failed")

    @property
    def _notes_failures(self) -> bool:
        """Whether something is written to a row that fails."""
        return self.retry is not None or self._has_dead_letter

    @property
    def has_times(self) -> bool:
        """Whether the package writes times of its own to a row."""
        retry = self.retry is not None and self.retry.next_attempt_at is not None
        return retry or self.lease is not None or self.claimed_at is not None

    def _due(self, model: type[Model]) -> Q | None:
        """Return the conditions for a row besides ``pending``; the user never writes them."""
        due: list[Q | None] = []
        if self.retry is not None:
            due.append(self.retry.due())
            # With a dead letter, a run also takes rows without attempts left, to write it to them.
            if self.failed is None:
                due.append(self._has_attempts(self.retry, model))
        if self.lease is not None:
            due.append(self.lease.free())
        return functools.reduce(operator.and_, filter(None, due)) if any(due) else None

    def _has_attempts(self, retry: Retry, model: type[Model]) -> Q | None:
        left = retry.has_attempts_left(model)
        if left is None or self.lease is None or not self._has_dead_letter:
            return left
        # A row whose last worker died still has its lease, and gets its dead letter.
        return left | Q(**{f"{self.lease.field}__isnull": False})


def takes(function: Any, *args: object) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def options() -> list[str]:
    """Return the names of all options."""
    return [name for name in Definition.__annotations__ if not name.startswith("_")]
