"""The decorator for functions: ``@batch_processor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from django.db.models import Model, QuerySet
from django.db.models.expressions import Combinable

from dcl_processor.options.kinds import Delivery, Lease
from dcl_processor.options.retry import Retry
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.exceptions import InvalidOption
from dcl_processor.report.observer import Gate, Observer

M = TypeVar("M", bound=Model)
Handler = Callable[[M], Any] | Callable[[M, Any], Any]
Opens = Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]


class Options(TypedDict, total=False):
    """The options of ``@batch_processor`` besides its own parameters."""

    name: str
    delivery: Delivery | Literal["transactional", "at_most_once", "at_least_once"]
    batch_size: int
    reset: Mapping[str, Any] | None
    claim: Mapping[str, Any] | None
    claimed_at: str | None
    lease: Lease | None
    concurrency: int
    handler_timeout: float | timedelta | None
    max_in_flight: int | None
    rate: float | None
    group_by: str | None
    in_order: bool
    max_per_group: int | None
    fair_by: str | None
    pending_since: str | Combinable | None
    retry: Retry | None
    max_consecutive_failures: int | None
    max_pending: int | None
    using: str | None
    gates: Sequence[Gate]
    observers: Sequence[Observer]


def batch_processor(
    *misplaced: Any,
    pending: QuerySet[M] | Callable[[], QuerySet[M]] | None = None,
    done: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
    failed: Mapping[str, Any] | Callable[[M, Exception], Mapping[str, Any] | None] | None = None,
    resource: Opens | None = None,
    **options: Unpack[Options],
) -> Callable[[Handler[M]], BatchProcessor[M]]:
    """Turn a function of one row into a processor; the function's name becomes the processor's.

    ``pending``: a queryset (cloned for each window), or a callable without arguments that
    returns one. ``done``: the flip as a mapping, or a callable ``(row, result) -> mapping``, or
    ``(row) -> mapping`` if the handler's result does not matter, or ``None`` if the function itself
    takes the row out of ``pending``. Every other option of ``BatchProcessor`` may be given too.

        >>> @batch_processor(
        ...     pending=lambda: Order.objects.filter(shipped_email_sent=False),
        ...     done={"shipped_email_sent": True},
        ... )
        ... def send_shipped_emails(order): ...

    Returns a ``BatchProcessor`` instance: ``send_shipped_emails()`` runs it, and
    ``send_shipped_emails.process(order)`` is the plain function, for a unit test. Raises the same
    errors as ``BatchProcessor``.
    """
    _refuse(misplaced, options)
    own: dict[str, Any] = {
        "get_done" if callable(done) else "done": done,
        "get_failed" if callable(failed) else "failed": failed,
        "resource": resource,
    }
    given = {name: value for name, value in own.items() if value is not None} | options
    return lambda function: _decorated(function, pending=pending, **given)


def _refuse(misplaced: Sequence[Any], options: Mapping[str, Any]) -> None:
    if misplaced:
        raise InvalidOption(
            "expected @batch_processor(pending=…, done=…) with keyword arguments only, got "
            f"{misplaced[0]!r}; give each option by its name."
        )
    if "process" in options:
        raise InvalidOption(
            "expected the decorated function to be the handler, got process=… as well; leave one "
            "of the two out."
        )


def _decorated(function: Handler[M], **given: Any) -> BatchProcessor[M]:
    identity = _identity(function)
    processor: BatchProcessor[M] = BatchProcessor(process=function, **given)
    vars(processor).update(identity)
    return processor


def _identity(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the attributes that the processor takes over from its handler."""
    if not hasattr(function, "__name__") or getattr(function, "__module__", None) is None:
        raise InvalidOption(
            "expected the handler to be a function, which gives the processor its name, got "
            f"{function!r}; pass it to BatchProcessor(process=…, pending=…, name=…) instead."
        )
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    return {name: getattr(function, name) for name in names}
