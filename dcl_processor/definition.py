"""What the user writes: a ``BatchProcessor``; the other spelling is the ``decorator``'s.

Both end in a validated instance. What can be judged without the model is judged
here, when it is defined; the rest in ``manage.py check`` and at the first run.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from threading import Event
from typing import Any, Generic, Never, TypeVar

from django.apps import apps
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now

from . import doubt, validation
from .delivery import Delivery
from .lease import Lease
from .report import Report
from .retry import Retry
from .runner import Run

M = TypeVar("M", bound=Model)


class _DefaultName:
    """Gives "<label of the app the code is in>.<name>", once the apps are known."""

    def __get__(self, processor: BatchProcessor[Any] | None, owner: type) -> str:
        if processor is None:
            return owner.__name__
        # Before the apps are loaded nobody knows them; the module still tells where it is.
        module = processor.__module__
        config = apps.get_containing_app_config(module) if apps.apps_ready else None
        label = config.label if config else module
        return f"{label}.{processor.__name__}"


class BatchProcessor(Generic[M]):
    """Process the pending rows of a model, once each, from any number of copies.

    Subclass it with ``pending()`` and ``process()``, and instantiate the subclass at module
    level in an app's ``processors.py``; or decorate a function with ``@batch_processor``.
    Calling the instance runs it.

    The pattern is double-checked locking: a lock-free read, then per row a lock and *the same
    question asked again under the lock*, the work, and the flip that takes the row out of
    ``pending``. Spring Batch calls the flag a process indicator.

    Options (class attributes, or keyword arguments of the instance):

    - ``name``: default "<app label>.<class or function name>"; not inherited.
    - ``delivery``: the order of lock, work, flip and commit, which decides what a crash does.
    - ``batch_size``: rows that are claimed together: of one transaction where the delivery is
      ``TRANSACTIONAL``, of one claiming transaction otherwise.
    - ``strict_order``: take the rows in the queryset's order over all pending rows, and not only
      within each window; every window is then read from the head again.
    - ``done``: the flip, column names to values, ``F()`` and ``Now()`` included; a callable value
      is called at the flip. ``None``: the handler itself takes the row out of ``pending``, and
      that is verified.
    - ``failed``: written to a row that is given up on, or discarded: the dead letter.
    - ``reset``: puts a row back into ``pending``; ``requeue()`` needs it, and so does every second
      attempt of ``AT_MOST_ONCE``.
    - ``retry``: a ``Retry``, which says when a failed row is tried again, and when no more.
    - ``max_consecutive_failures``: so many rows that fail one after the other end the run.
    - ``claim``: ``AT_MOST_ONCE`` only; written instead of ``done`` before the work.
    - ``claimed_at``: ``AT_MOST_ONCE`` only; a ``DateTimeField`` that is set with ``claim``.
    - ``lease``: ``AT_LEAST_ONCE`` only, and needed there: a ``Lease``.
    - ``repeats``: a row may rightly stay pending after its flip; it is handled once per run.
    - ``using``: the database alias that is locked and written; default: the router's.
    - ``read_using``: the alias of the lock-free read, which may be a replica: it is only a hint.

    Raises ``InvalidOption``, ``InvalidPending``, ``InvalidDone`` or ``Unsupported`` when it is
    instantiated with something that cannot work.
    """

    name: str = _DefaultName()  # type: ignore[assignment]  # a descriptor that gives a str
    delivery: Delivery = Delivery.TRANSACTIONAL
    batch_size: int = 1
    strict_order: bool = False
    done: Mapping[str, Any] | None = None
    repeats: bool = False
    failed: Mapping[str, Any] | None = None
    reset: Mapping[str, Any] | None = None
    retry: Retry | None = None
    max_consecutive_failures: int | None = None
    claim: Mapping[str, Any] | None = None
    claimed_at: str | None = None
    lease: Lease | None = None
    using: str | None = None
    read_using: str | None = None

    __name__: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = _DefaultName()  # type: ignore[assignment]  # as above; never inherited

    def __init__(self, **options: Any) -> None:
        validation.check_option_names(type(self), options)
        self.__name__ = type(self).__name__
        for option, value in options.items():
            setattr(self, option, value)
        inherited = (self.pending, BatchProcessor.pending), (self.process, BatchProcessor.process)
        missing = {
            base.__name__ for method, base in inherited if getattr(method, "__func__", None) is base
        }
        if self._handles_batches:
            missing.discard("process")
        validation.check_options(self, missing)

    def pending(self) -> QuerySet[M]:
        """Return the rows that wait to be handled; asked afresh for every window of rows."""
        raise NotImplementedError

    # Both stars: to a type checker an override may then take the resource, or take none.
    def process(self, row: M, /, *arguments: Any, **_: Any) -> Any:
        """Handle one row, which is locked and was pending when it was locked.

        The second argument is the ``resource()``, when there is one. What it returns is given to
        ``get_done()``. What it raises is the row's failure: its transaction is rolled back and
        the row stays pending.
        """
        raise NotImplementedError

    def process_batch(
        self, rows: Sequence[M], /, *arguments: Any, **_: Any
    ) -> Sequence[Any] | None:
        """Handle the rows of a batch together, instead of ``process()`` for each.

        Returns ``None``, or the results in the order of the rows. When it raises, nothing of the
        batch is flipped, and it is called again for each row alone, so that only the row to blame
        fails: Spring Batch's scan.
        """
        raise NotImplementedError

    def resource(
        self,
    ) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None:
        """Return what the handler needs open, such as a connection to a mail server.

        Opened before the first row of a run, once per thread, and given to the handler as its
        second argument; opened anew after a row failed; closed at the end.
        """
        return None

    def get_failed(self, row: M, error: Exception, /) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what is written to a row that is given up on: the dead letter.

        Override it to keep more than the ``retry``'s ``last_error``.
        """
        return self.failed or {}

    def in_doubt(self, *, older_than: float | timedelta) -> QuerySet[M, M]:
        """Return the rows whose claim is older than this and was never settled.

        Their process died, or is still at work: look at them, then ``mark_done()`` or
        ``requeue()``. ``older_than``: seconds, by the database's clock. Needs ``claim`` and
        ``claimed_at``.
        """
        return doubt.in_doubt(self, older_than)

    def mark_done(self, rows: QuerySet[M, M]) -> int:
        """Write ``done`` to claimed rows whose work turned out to be done; return how many."""
        return doubt.mark_done(self, rows)

    def requeue(self, rows: QuerySet[M, M]) -> int:
        """Put rows back into ``pending``, as if they had never been tried; return how many.

        Writes ``reset``, which is needed for that, and the ``retry``'s columns.
        """
        return doubt.requeue(self, rows)

    def get_done(self, row: M, result: Any, /) -> Mapping[str, Any]:  # noqa: ARG002  # see below
        """Return the flip for a row, given what the handler returned.

        Override it to keep a result, such as a tracking number, in the same write as the flag.
        """
        return self.done or {}

    def run(
        self,
        *,
        filter: Q | None = None,
        using: str | None = None,
        limit: int | None = None,
        timeout: float | timedelta | None = None,
        wait_for_locked: float | timedelta = 10,
        concurrency: int = 1,
        stop: Event | None = None,
    ) -> Report:
        """Handle what is pending now, and return what became of it.

        ``filter``: narrows this run to some of the pending rows; ANDed into both checks.
        ``using``: overrides the option. ``limit``: handler calls, at most. ``timeout``: seconds
        after which no row starts. ``wait_for_locked``: seconds to keep coming back to rows that
        others had locked; never outlasts ``timeout``. ``concurrency``: handlers in flight at once;
        more than 1 needs an ``async def`` handler. ``stop``: no row starts once it is set.

        Raises ``InsideTransaction`` inside ``atomic()`` (Django's own ``TestCase`` excepted),
        ``StillPending`` before any handler when ``done`` would leave a row pending, and
        configuration errors for what only the model can tell. Rows that fail do not raise:
        they are in the report.
        """
        return Run(
            self,
            filter=filter,
            using=using,
            limit=limit,
            timeout=timeout,
            wait_for_locked=wait_for_locked,
            concurrency=concurrency,
            stop=stop,
        ).report()

    def __call__(
        self,
        *rows: Never,
        filter: Q | None = None,
        using: str | None = None,
        limit: int | None = None,
        timeout: float | timedelta | None = None,
        wait_for_locked: float | timedelta = 10,
        concurrency: int = 1,
        stop: Event | None = None,
    ) -> Report:
        """Run it: the same as ``run()``."""
        validation.refuse_rows(self, rows)
        return self.run(
            filter=filter,
            using=using,
            limit=limit,
            timeout=timeout,
            wait_for_locked=wait_for_locked,
            concurrency=concurrency,
            stop=stop,
        )

    @property
    def _has_fixed_flip(self) -> bool:
        """Whether the flip is ``done``, whatever the handler returns."""
        rewritten = getattr(self.get_done, "__func__", None) is not BatchProcessor.get_done
        return self.done is not None and not rewritten

    @property
    def _rehearsal_suffices(self) -> bool:
        """Whether a flip that was right for one row is right for all: its values are constants.

        ``F("tries") + 1`` may take one row out of ``pending``, and leave another.
        """
        values = (self.done or {}).values()
        return self._has_fixed_flip and not any(
            hasattr(value, "resolve_expression") and not isinstance(value, Now) for value in values
        )

    def _due(self) -> Q | None:
        """Return what is demanded of a row beside being pending; the user never writes it."""
        due: list[Q] = []
        if self.retry is not None:
            due.append(self.retry.due())
            # With a dead letter, whoever meets a row without attempts left writes it.
            if not self._notes_failures or self.failed is None:
                due.append(self.retry.not_used_up())
        if self.lease is not None:
            due.append(self.lease.free())
        return functools.reduce(operator.and_, due) if due else None

    @property
    def _is_async(self) -> bool:
        """Whether the handler is to be awaited."""
        return inspect.iscoroutinefunction(self.process)

    @property
    def _handles_batches(self) -> bool:
        """Whether ``process_batch()`` was written."""
        written = getattr(self.process_batch, "__func__", None)
        return written is not BatchProcessor.process_batch

    @property
    def _notes_failures(self) -> bool:
        """Whether something is written about a row that was not handled."""
        rewritten = getattr(self.get_failed, "__func__", None) is not BatchProcessor.get_failed
        return self.retry is not None or self.failed is not None or rewritten

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
