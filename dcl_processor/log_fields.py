"""The fields of log records, and what they say of the run at hand.

``processor``, ``pk``, ``outcome``, ``attempt``, ``duration`` (seconds), ``worker``, ``using``,
``error_type``, ``run_id`` and ``row_count``: plain values, and only those that are known.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from dcl_processor.report.errors import (
    described,
    escaped,
    frames_of,
    printable,
    shown_traceback,
    traceback_text,
)

from . import worker


@dataclass(slots=True, frozen=True, eq=False)
class Running:
    """A run: its processor's name and delivery, its database, its id, and when it began.

    ``began_at``: nanoseconds since 1970, as traces count.
    """

    name: str
    delivery: str
    using: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: int = field(default_factory=time.time_ns)


#: The run of this context; the threads and the event loop of a run have its context.
running: ContextVar[Running | None] = ContextVar("dcl_processor_run", default=None)


@contextmanager
def known_as(run: Running) -> Iterator[None]:
    """Let the records of this context name the run."""
    token = running.set(run)
    try:
        yield
    finally:
        running.reset(token)


def fields(processor: str, *, pk: Any = None, **known: Any) -> dict[str, Any]:
    """Return the fields of a record about a processor, or about a row of it.

    ``known``: further fields; those that are ``None`` are left out.
    """
    found: dict[str, Any] = {"processor": processor, "worker": worker.number}
    run = running.get()
    if run is not None and run.name == processor:
        found.update(using=run.using, run_id=run.id)
    if pk is not None:
        found["pk"] = printable(str(pk))
    found.update((name, value) for name, value in known.items() if value is not None)
    return found


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return the field that names the class of an error."""
    return {"error_type": type(error).__qualname__}


def log(
    logger: logging.Logger,
    level: int,
    message: str,
    *arguments: Any,
    extra: dict[str, Any],
    exc_info: BaseException | None = None,
    traceback: str | None = None,
) -> None:
    """Log a record with fields; of arguments that are text or errors, each is one line.

    The text of an error is masked and capped, and so is the traceback that formatters of text
    write; ``exc_info`` has the error itself, whose class is a field, too. ``traceback``: its text,
    if that is known.

    A project whose own records have a field of the same name gets the record without ours.
    """
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    shown = tuple(_shown(each) for each in arguments)
    info: Any = exc_info and (type(exc_info), exc_info, frames_of(exc_info))
    extra = {**extra, **error_fields(exc_info)} if exc_info is not None else extra
    place = (logger.name, level, file, line, message, shown, info, function)
    try:
        record = logger.makeRecord(*place, extra)
    except KeyError:
        record = logger.makeRecord(*place)
    if exc_info is not None:
        # A formatter takes this text, and makes none of its own from ``exc_info``.
        record.exc_text = shown_traceback(traceback or traceback_text(exc_info)).rstrip("\n")
    try:
        logger.handle(record)
    except Exception:  # noqa: BLE001  # a handler or filter of the project; as logging's own do
        logging.Handler().handleError(record)


def _shown(argument: Any) -> Any:
    if isinstance(argument, BaseException):
        return described(argument)
    return escaped(argument) if isinstance(argument, str) else argument
