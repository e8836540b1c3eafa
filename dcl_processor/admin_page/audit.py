"""What operators did, in the admin's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model

from dcl_processor.insights import rows
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

from .models import Processor

#: With more rows there is one entry for all of them, on the processor.
MOST_ENTRIES = 100

#: Characters of a message.
LONGEST = 500


def record_rows(
    user: Any, processor: BatchProcessor[Any], pks: Sequence[Any], message: str, *, total: int
) -> None:
    """Log an action on rows: an entry for each of a few rows, which its history shows.

    ``total``: the rows of the whole action, of which these may be a part.
    """
    if not pks:
        return
    table = rows.question_of(processor, None).table
    found = [] if total > MOST_ENTRIES else list(table.filter(pk__in=pks))
    if len(found) == len(pks):
        _write(user, found, message)
    else:  # many, or some that were deleted since, perhaps by their handler
        # The number first: a long message is cut.
        record(user, processor.name, f"{len(pks):,} of {total:,} rows. {message}")


def record(user: Any, name: str, message: str) -> None:
    """Log an action on a processor, or ``""``: all."""
    _write(user, [Processor(name=name)], message)


def recent(name: str, number: int) -> list[LogEntry]:
    """Return the latest actions on a processor, and on all."""
    kind = ContentType.objects.get_for_model(Processor)
    found = LogEntry.objects.filter(content_type=kind, object_id__in=[name, ""])
    return [*found.select_related("user").order_by("-action_time", "-pk")[:number]]


def _write(user: Any, found: Sequence[Model], message: str) -> None:
    text: Any = shown(message, LONGEST)
    LogEntry.objects.log_actions(user.pk, found, CHANGE, text)
