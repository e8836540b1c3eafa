"""The processor: a definition that can be run."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import timedelta
from threading import Event
from typing import Any, ClassVar, TypeVar

from django.db.models import Model, Q, QuerySet

from dcl_processor.core import holdings
from dcl_processor.core.engine.run import Run
from dcl_processor.core.options import names, validation
from dcl_processor.core.options.options import DefaultName, Definition, Identity, options
from dcl_processor.core.report.exceptions import Unsupported
from dcl_processor.core.report.report import Report

M = TypeVar("M", bound=Model)

#: The processors whose runs this context is in.
_running: ContextVar[tuple[object, ...]] = ContextVar("dcl_processor_running", default=())


class BatchProcessor(Definition[M]):
    """Process the pending rows of a model, once each, with any number of workers.

    Subclass it with ``pending()`` and ``process()``, and instantiate the subclass at module
    level in an app's ``processors.py``; or decorate a function with ``@batch_processor``.
    Calling the instance runs it.

    The pattern is double-checked locking: a lock-free read, then for each row a lock, *the same
    question again under the lock*, the work, and the flip that takes the row out of ``pending``.
    Options are class attributes, or keyword arguments of the instance.
    """

    #: A Django template calls what can be called, and showing a processor must not run it.
    do_not_call_in_templates: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = DefaultName()  # type: ignore[assignment]  # never inherited
        names.check_class(cls)

    def __init__(self, **given: Any) -> None:
        names.check_options(type(self), options(), given)
        self.__name__ = type(self).__name__
        #: Copies of the instance share this object, because they are the same processor.
        self._identity = Identity()
        for option, value in given.items():
            setattr(self, option, value)
        handler = "process_batch" if self._handles_batches else "process"
        validation.check(self, [hook for hook in ("pending", handler) if not self._writes(hook)])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def in_doubt(self, *, older_than: float | timedelta) -> QuerySet[M, M]:
        """Return the rows whose claim is older than ``older_than`` and was never settled.

        Their process died, or is still at work. ``older_than``: seconds (or a ``timedelta``) by the
        database's clock. Raises ``InvalidOption`` without ``claim`` and ``claimed_at``, and with a
        lease, after which another worker takes a row over.
        """
        return holdings.in_doubt(self, older_than)

    def in_progress(self) -> QuerySet[M, M]:
        """Return the rows that workers hold now, as far as the database shows it."""
        return holdings.in_progress(self)

    def lock_key(self, key: Any, using: str | None = None) -> None:
        """Wait for the lock of a key of ``group_by``, and hold it until the transaction ends.

        For code that inserts rows of the key, or changes their order. ``key``: a value of the
        column, or the related row; ``None``, which is no key, locks nothing.
        """
        holdings.lock_key(self, key, using)

    def run(
        self,
        *,
        filter: Q | None = None,
        using: str | None = None,
        limit: int | None = None,
        timeout: float | timedelta | None = None,
        wait_for_locked: float | timedelta = 10,
        concurrency: int | None = None,
        stop: Event | None = None,
    ) -> Report:
        """Handle the rows that are pending now, and return a report.

        ``filter``: narrows this run to some of the pending rows; ANDed into both checks. ``using``
        and ``concurrency``: override the options. ``limit``: the most handler calls. ``timeout``:
        seconds after which no row starts. ``wait_for_locked``: seconds to keep coming back to rows
        that other workers had locked. ``stop``: no row starts once it is set.

        Rows that fail do not raise: they are in the report. An error that ends the run, such as a
        lost connection to the server, has the attribute ``report``: what was processed until then.
        """
        if self._identity in _running.get():
            raise Unsupported(
                f"{self.name}: expected the handler not to run its own processor, got a run inside "
                "a run, which would nest once more for every row; remove the call, because the "
                "current run takes the other rows."
            )
        token = _running.set((*_running.get(), self._identity))
        try:
            return Run(
                self,
                filter=filter,
                using=using,
                limit=limit,
                timeout=timeout,
                wait_for_locked=wait_for_locked,
                concurrency=concurrency,
                stop=stop,
            ).execute()
        finally:
            _running.reset(token)

    def __call__(self, *rows: Any, **parameters: Any) -> Report:
        """Run the processor, as ``run()`` does; raises ``TypeError`` if it is called with a row."""
        validation.refuse_rows(self, rows)
        return self.run(**parameters)
