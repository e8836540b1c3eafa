"""What the user writes, as options and hooks; ``BatchProcessor`` adds the methods that use it.

A definition is validated here, as far as that needs no model; the rest is validated by ``manage.py
check`` and at the first run.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from typing import Any, Generic, TypeVar

from django.apps import apps
from django.db.models import Model, Q, QuerySet
from django.db.models.expressions import Combinable

from dcl_processor.values import seconds

from . import functions, gone, validation
from .kinds import Delivery, Lease
from .retry import Retry

M = TypeVar("M", bound=Model)

#: What ``process_batch()`` returns: nothing, or results in the order of the rows.
Results = Sequence[Any] | None


class _DefaultName:
    """Gives "<label of the app the code is in>.<name>", once the apps are known."""

    def __get__(self, processor: Definition[Any] | None, owner: type) -> str:
        if processor is None:
            return owner.__name__
        # Before the apps are loaded their labels are unknown; the module's name is used instead.
        module = processor.__module__
        label = _app_label(module) if apps.apps_ready else module
        return f"{label}.{processor.__name__}"


@functools.cache
def _app_label(module: str) -> str:
    """Return the label of the app that a module is in, or the module's name if it is in none."""
    config = apps.get_containing_app_config(module)
    return config.label if config else module


class Definition(Generic[M]):
    """The validated options and hooks of a ``BatchProcessor``; the stages read only these."""

    name: str = _DefaultName()  # type: ignore[assignment]  # a descriptor that gives a str
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
    max_workers: int | None = None
    rate: float | None = None
    group_by: str | None = None
    in_order: bool = False
    max_per_group: int | None = None
    pending_since: str | Combinable | None = None
    using: str | None = None

    __name__: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = _DefaultName()  # type: ignore[assignment]  # as above; never inherited
        gone.refuse(cls.__name__, vars(cls), gone.OF_A_PROCESSOR)

    def __init__(self, **options: Any) -> None:
        functions.check_options(type(self), _options(), options)
        self.__name__ = type(self).__name__
        #: Copies of the instance share this object, because they are the same processor.
        self._identity = object()
        for option, value in options.items():
            setattr(self, option, value)
        handler = "process_batch" if self._handles_batches else "process"
        validation.check(self, [hook for hook in ("pending", handler) if not self._writes(hook)])
        #: Whether the flip cannot be known before the handler has returned.
        self._flip_needs_result = not self._has_fixed_flip and functions.takes(
            self.get_done, None, None
        )

    def pending(self) -> QuerySet[M]:
        """Return the rows that wait to be handled; called again for every window of rows."""
        raise NotImplementedError

    # Both stars, so that a type checker allows overrides with and without the resource.
    def process(self, row: M, /, *arguments: Any, **_: Any) -> Any:
        """Handle one row, which is locked and was pending when it was locked.

        The second argument is the ``resource()``, if there is one. The return value is passed to
        ``get_done()``. If it raises, the row fails, and what it wrote with the row is rolled back;
        ``delivery``, ``retry`` and ``failed`` decide what the row has then. An exception that is
        returned, such as ``Snooze`` or ``Discard``, is taken as raised.
        """
        raise NotImplementedError

    def process_batch(self, rows: Sequence[M], /, *arguments: Any, **_: Any) -> Results:
        """Handle the rows of a batch together, instead of ``process()`` for each.

        Returns ``None``, or the results in the order of the rows. An exception among the results,
        such as ``Snooze`` or ``Discard``, is the outcome of its row, and what was written stays. It
        is a plain function, and is refused with ``AT_MOST_ONCE``.

        If the method raises, it is called again for each row alone, so that only the row that
        causes the error fails: Spring Batch's scan. With ``TRANSACTIONAL`` nothing of the first
        call is kept.
        """
        raise NotImplementedError

    def resource(self) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None:
        """Return what the handler needs open, such as a connection to a mail server.

        It is opened before the first row of a run, once per thread, and passed to the handler as
        its second argument. It is reopened after a row failed, and closed at the end.
        """
        return None

    def get_failed(self, row: M, error: Exception, /) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what is written to a row that is given up on: the dead letter.

        Override it to keep more than the ``retry``'s ``last_error``. An empty mapping leaves the
        row as it is: pending, or, with ``AT_MOST_ONCE``, in doubt.
        """
        return self.failed or {}

    def get_done(self, row: M, result: Any, /) -> Mapping[str, Any]:  # noqa: ARG002  # see below
        """Return the flip for a row, from the handler's result.

        Override it to keep a result, such as a tracking number, in the same write as the flag. If
        the override takes only the row, it is tried on a row before any handler is called.
        """
        return self.done or {}

    @property
    def _label(self) -> str:
        """Return the user's name for the processor; its option ``name`` may be what is wrong."""
        handler = vars(self).get("process")
        return getattr(handler, "__name__", None) or type(self).__name__

    def _writes(self, hook: str) -> bool:
        """Whether the user has written this method."""
        return getattr(getattr(self, hook), "__func__", None) is not getattr(Definition, hook)

    @functools.cached_property
    def _has_fixed_flip(self) -> bool:
        """Whether the flip is ``done``, whatever the handler returns."""
        return self.done is not None and not self._writes("get_done")

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
        # A function as ``failed`` may leave a row as it is, so that the row would be taken in every
        # run. A lease that was not removed shows that the worker died in the last attempt.
        return left | self.lease.held()

    @property
    def _is_async(self) -> bool:
        """Whether the handler is to be awaited."""
        return not self._handles_batches and inspect.iscoroutinefunction(self.process)

    @property
    def _time_limit(self) -> float | None:
        """The seconds that a call of the handler may take."""
        return None if self.handler_timeout is None else seconds(self.handler_timeout)

    @functools.cached_property
    def _handles_batches(self) -> bool:
        """Whether ``process_batch()`` was overridden."""
        return self._writes("process_batch")

    @property
    def _has_dead_letter(self) -> bool:
        """Whether a row that is given up on may be written to."""
        return self.failed is not None or self._writes("get_failed")

    @property
    def _notes_failures(self) -> bool:
        """Whether something is written to a row that was not handled."""
        return self.retry is not None or self._has_dead_letter

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _options() -> list[str]:
    """Return the names of the options, which are annotated in the class."""
    return [name for name in Definition.__annotations__ if not name.startswith("_")]
