"""Everything that dcl_processor raises, under one root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from .report import Report


class ProcessorError(Exception):
    """The root of every error raised by dcl_processor."""


class InvalidOption(ProcessorError, ImproperlyConfigured):
    """An option, or a parameter of ``run()``, is unknown or has an unusable value."""


class InvalidPending(ProcessorError, ImproperlyConfigured):
    """``pending`` is not a queryset whose rows can be locked and asked about one by one."""


class InvalidDone(ProcessorError, ImproperlyConfigured):
    """``done`` cannot be written to the model."""


class StillPending(ProcessorError, ImproperlyConfigured):
    """A row would be pending again after it was handled: it would be handled for ever."""


class InsideTransaction(ProcessorError):
    """A run was started inside ``transaction.atomic()``, where no row can be committed."""


class Unsupported(ProcessorError, ImproperlyConfigured):
    """What was asked for cannot be had with this database, delivery or version."""


class RowsFailed(ProcessorError):
    """Some rows of a run failed; raised by ``Report.raise_for_failures()``.

    The report is in ``report``; the first row's error is the ``__cause__``.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
