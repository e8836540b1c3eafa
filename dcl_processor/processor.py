"""The processor: a definition that can be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, Never, TypedDict, TypeVar, Unpack

from django.db.models import Model, Q, QuerySet

from dcl_processor.options import validation
from dcl_processor.options.options import DefaultName, Definition, Identity, options
from dcl_processor.report.exceptions import InvalidOption, Unsupported
from dcl_processor.report.report import Report

if TYPE_CHECKING:
    from dcl_processor.contrib.reservations import Reservation
    from dcl_processor.engine.trial import DryRun

M = TypeVar("M", bound=Model)

#: The module that the registry imports now, in which a call would run at each manage.py check.
importing: ContextVar[str | None] = ContextVar("importing", default=None)

#: The processors whose runs this context is in.
_running: ContextVar[tuple[object, ...]] = ContextVar("dcl_processor_running", default=())


class RunParameters(TypedDict, total=False):
    """The parameters of ``BatchProcessor.run()``."""

    filter: Q | None
    using: str | None
    limit: int | None
    timeout: float | timedelta | None
    wait_for_locked: float | timedelta
    concurrency: int | None
    stop: Event | None


class BatchProcessor(Definition[M]):
    """Process the pending rows of a model, once each, with any number of workers.

    Subclass it with ``pending()`` and ``process()``, and instantiate the subclass at module
    level in an app's ``processors.py``; or decorate a function with ``@batch_processor``.
    Calling the instance runs it.

    The pattern is double-checked locking: a lock-free read, then for each row a lock, *the same
    question again under the lock*, the work, and the flip that takes the row out of ``pending``.
    Options (class attributes, or keyword arguments of the instance):

    - ``name``: default "<app label>.<class or function name>"; not inherited.
    - ``delivery``: the order of lock, work, flip and commit, which decides what a crash does.
    - ``batch_size``: rows that are claimed together: in one transaction if the delivery is
      ``TRANSACTIONAL``, otherwise in one claiming transaction.
    - ``done``: the flip, column names to values, ``F()`` and ``Now()`` included; a callable value
      is called at the flip. ``None``: the handler itself takes the row out of ``pending``, which
      is verified.
    - ``failed``: written to a row that is given up on, or discarded: the dead letter. Without
      ``retry`` a row is given up on at its first failure.
    - ``reset``: puts a row back into ``pending``; ``requeue()`` needs it, and so does every second
      attempt of ``AT_MOST_ONCE``, and a ``claim`` beside a lease.
    - ``retry``: a ``Retry``, which sets when a failed row is tried again, and when no more.
    - ``max_consecutive_failures``: consecutive failed rows that end the run; 0: failures do not end
      it. ``None``: a run in which nothing succeeds ends after 50.
    - ``max_pending``: the most rows that may wait when a run without ``limit`` begins; if more do,
      it raises ``TooManyPending`` before its first row. ``None``: any number.
    - ``claim``: the mark of a row that is being handled, such as a status and the worker's name.
      ``AT_MOST_ONCE``: written instead of ``done`` before the work. ``AT_LEAST_ONCE``: written and
      removed with the lease; the row has to stay in ``pending`` under it, and ``reset`` is
      required. A callable value is called at the claim.
    - ``claimed_at``: a ``DateTimeField`` that is set with ``claim``, and cleared when the row is
      settled.
    - ``lease``: ``AT_LEAST_ONCE`` only, and required there: a ``Lease``.
    - ``concurrency``: handlers in flight at once, unless a run overrides it.
    - ``handler_timeout``: seconds (or a ``timedelta``) that a call of the handler may take, from
      0.05 to a day; then it is interrupted, and the row fails with ``HandlerTimeout``.
    - ``max_in_flight``: rows of this processor that may be at work at the same time, on all
      machines together; a batch of ``TRANSACTIONAL`` is one. PostgreSQL only, and not with
      ``group_by``.
    - ``rate``: rows that may start in a second, on all machines together; it may be below 1. Needs
      the app ``dcl_processor.ledger``.
    - ``group_by``: a column, or a forward relation; rows with the same value, the key, are never
      handled at the same time, by all workers together. Rows with ``NULL`` are in no group.
    - ``in_order``: with ``group_by``; the rows of a key are handled one after another, in the
      order of ``pending``; a row that fails, waits or is in doubt blocks those behind it.
    - ``max_per_group``: with ``group_by``; rows of one key in flight at once, over all workers.
    - ``fair_by``: a column, or a forward relation; rows of each of its values start in turn.
      PostgreSQL only, and not with ``group_by``.
    - ``pending_since``: since when a row has been pending: a ``DateTimeField``, or an expression;
      the command computes ages from it.
    - ``using``: the database alias that is locked and written; default: the router's.
    - ``observers``: objects with ``run(event)`` and ``row(event)``, which look on at runs.
    - ``gates``: objects with ``may_start(n)`` and ``ended(outcomes)``, which let rows start.

    Raises ``InvalidOption``, ``InvalidPending``, ``InvalidDone`` or ``Unsupported`` if it is
    instantiated with options that cannot work.
    """

    #: A Django template calls what can be called, and showing a processor must not run it.
    do_not_call_in_templates: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = DefaultName()  # type: ignore[assignment]  # never inherited

    def __init__(self, **given: Any) -> None:
        validation.check_options(type(self), options(), given)
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
        from dcl_processor.operator import actions  # loaded when used

        return actions.in_doubt(self, older_than)

    def in_progress(self) -> QuerySet[M, M]:
        """Return the rows that workers hold now, as far as the database shows it."""
        from dcl_processor.operator import actions  # loaded when used

        return actions.in_progress(self)

    def mark_done(
        self, rows: QuerySet[M, M], *, values: Mapping[str, Any] | None = None, force: bool = False
    ) -> int:
        """Write ``done`` to rows whose work turned out to be done; return how many.

        ``values``: written besides ``done``; where that is a function, they have to take the rows
        out of ``pending``, and out of ``claim``. Each row is locked, and checked again: it has to
        be among ``rows``, given up, or claimed for longer than a minute for each row of a batch,
        and without a lease that has not lapsed. Others stay as they are, and a warning is logged
        with their number and the first keys. ``force``: also rows with a younger claim, or in
        another state. Raises ``InvalidOption`` without such values, and if ``rows`` is no queryset
        of the processor's model, or a slice of one; ``InvalidDone`` for values that name no column;
        ``StillPending`` for values that do not settle a row; ``InsideTransaction`` as
        ``requeue()``.
        """
        from dcl_processor.operator import actions  # loaded when used

        return actions.act(actions.to_mark_done(self, rows, values, force=force))

    def requeue(self, rows: QuerySet[M, M], *, force: bool = False) -> int:
        """Put rows back into ``pending``, as if they had never been tried; return how many.

        Writes ``reset``, and the ``retry``'s columns, to rows that are in doubt, given up or
        pending. Each row is locked, and checked again. A row that is done stays as it is, also if a
        worker has settled it since it was read here, and so does a row whose lease has not lapsed;
        a warning is logged with their number and the first keys. Where no column shows the state,
        as with a claim that has neither a time nor a lease, only pending rows are put back.
        ``force``: also rows that are done, which a worker then handles again.

        Raises ``InvalidOption`` without ``reset``, and if ``rows`` is no queryset of the
        processor's model, or a slice of one; ``InsideTransaction`` inside ``atomic()``.
        """
        from dcl_processor.operator import actions  # loaded when used

        return actions.act(actions.to_requeue(self, rows, force=force))

    def discard(
        self,
        rows: QuerySet[M, M],
        *,
        reason: str = "",
        values: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> int:
        """Give up on rows that are pending or claimed, as ``Discard`` does; return how many.

        Writes ``failed``, and ``values``, which have to be passed where ``failed`` is a function.
        ``reason``: written to the ``retry``'s ``last_error``. Each row is locked, and checked
        again: it has to be among ``rows``, pending or claimed, and without a lease that has not
        lapsed, or a claim of less than a minute for each row of a batch. ``force``: also rows with
        such a claim, or in another state. Raises ``InvalidOption`` without ``failed`` and
        ``values``, and if ``rows`` is no queryset of the processor's model, or a slice of one;
        ``InvalidDone`` for values that name no column; ``StillPending`` for values that do not
        settle a row; ``InsideTransaction`` as ``requeue()``.
        """
        from dcl_processor.operator import actions  # loaded when used

        return actions.act(actions.to_discard(self, rows, reason, values, force=force))

    def reserve(
        self,
        limit: int = 1,
        *,
        filter: Q | None = None,
        using: str | None = None,
        bound_to: str | None = None,
    ) -> list[Reservation[M]]:
        """Hand out up to ``limit`` pending rows, which the caller handles and settles.

        The rows are claimed and marked as in a run, and the attempt is counted; a row that has used
        up its attempts is given up on instead, and counts for ``limit``. ``filter`` and ``using``:
        as for ``run()``. ``bound_to``: whom the rows are handed to; their tokens are valid only
        together with it.

        Raises ``Unsupported`` unless the processor has ``claim``, ``claimed_at`` and ``reset``, and
        inside the processor's own handler; ``InsideTransaction`` inside ``atomic()``; and what
        ``run()`` raises before any handler.
        """
        from dcl_processor.contrib import reservations  # loaded when used

        with self._entered():
            return reservations.reserve(self, limit, filter=filter, using=using, bound_to=bound_to)

    def reservation(self, token: str, *, bound_to: str | None = None) -> Reservation[M]:
        """Return the reservation of a token that came back, with its row as it is now.

        ``bound_to``: as it was given to ``reserve()``. Raises ``InvalidToken`` for a token that
        this processor did not give out, or not to ``bound_to``; ``ReservationLost`` if the row was
        deleted; ``Unsupported`` for a processor that ``reserve()`` refuses.
        """
        from dcl_processor.contrib import reservations  # loaded when used

        return reservations.from_token(self, token, bound_to=bound_to)

    def lock_key(self, key: Any, using: str | None = None) -> None:
        """Wait for the lock of a key of ``group_by``, and hold it until the transaction ends.

        For code that inserts rows of the key, or changes their order. ``key``: a value of the
        column, or the related row; one that the column cannot have raises Django's error.
        """
        from dcl_processor.keys.columns import lock_key  # loaded when used

        if self.is_transactional and self.most_of_a_key != 1 and self._identity in _running.get():
            raise Unsupported(
                f"{self.name}: expected lock_key() outside the handlers of a processor with "
                f"max_per_group={self.max_per_group}, where two of them would wait for each "
                "other, got it inside one; call it where the rows are inserted."
            )
        lock_key(self, key, using)

    def wake(self) -> None:
        """Notify watchers to look for pending rows now: ``processors run --watch --listen``.

        Inside ``atomic()`` it notifies after the commit, otherwise at once. A transaction notifies
        once, however often it is called. It is a hint that may be lost, and does nothing on a
        database other than PostgreSQL, where watchers only poll.
        """
        from dcl_processor.workers import notify  # loaded when used

        notify.wake(self)

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
        from dcl_processor.engine.run import Run  # loaded when used

        with self._entered():
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

    def dry_run(
        self, *, filter: Q | None = None, using: str | None = None, limit: int | None = None
    ) -> DryRun:
        """Return what ``run()`` with these parameters would do now; call no handler.

        The flips are tried on the first row that is free, and rolled back. Raises
        ``InsideTransaction``, ``TooManyPending``, ``StillPending`` and the configuration errors
        that depend on the model, as ``run()`` does.
        """
        from dcl_processor.engine.trial import dry_run  # loaded when used

        with self._entered():
            return dry_run(self, filter=filter, using=using, limit=limit)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Refuse a run inside a run, and one while the module is imported; note this one."""
        if not hasattr(self, "_identity"):
            raise InvalidOption(
                f"expected {type(self).__name__}.__init__() to call super().__init__(), which "
                "checks the options, got a processor without them."
            )
        if (module := importing.get()) is not None:
            raise Unsupported(
                f"expected {self.name} to run after {module} is imported, got a call at module "
                "level; move it into a function, or remove it."
            )
        if self._identity in _running.get():
            raise Unsupported(
                f"{self.name}: expected the handler not to run its own processor, got a run inside "
                "a run, which would nest once more for every row; remove the call, because the "
                "current run takes the other rows."
            )
        token = _running.set((*_running.get(), self._identity))
        try:
            yield
        finally:
            _running.reset(token)

    def __call__(self, *rows: Never, **parameters: Unpack[RunParameters]) -> Report:
        """Run the processor, as ``run()`` does; raises ``TypeError`` if it is called with a row."""
        if rows:
            name = self.__name__
            raise TypeError(
                f"expected {name}() without a row, because it runs over all pending rows, got "
                f"{rows[0]!r}; call {name}.process(row) to handle one row, or "
                f"{name}(filter=Q(pk=…)) to run for some rows."
            )
        return self.run(**parameters)
