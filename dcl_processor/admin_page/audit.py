"""What operators did, in the admin's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.db.models import Model

from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_text
from dcl_processor.masking import shown
from dcl_processor.processor import BatchProcessor

from .models import Processor

logger = logging.getLogger("dcl_processor")

#: With more rows there is one entry for all of them, on the processor.
MOST_ENTRIES = 100

#: Characters of a message, and of a row's text.
LONGEST, LONGEST_TEXT = 500, 200


def record_rows(
    user: Any, processor: BatchProcessor[Any], pks: Sequence[Any], message: str, *, total: int
) -> None:
    """Log an action on rows: an entry for each of a few rows, which its history shows.

    ``total``: the rows of the whole action, of which these may be a part. An error is logged and
    not raised, because the rows are written to already.
    """
    if not pks:
        return
    with _logged(user, processor.name, f" to {len(pks):,} rows", message):
        if total > MOST_ENTRIES:
            # The number first: a long message is cut.
            name, said = processor.name, f"{len(pks):,} of {total:,} rows. {message}"
            _write(user, Processor, [(name, name)], said)
            return
        question = rows.question_of(processor, None)
        # A row that was deleted since, perhaps by its handler, has an entry by its key.
        named = {pk: f"row {key_text(pk)}" for pk in pks}
        try:
            named |= {row.pk: str(row) for row in question.table.filter(pk__in=pks)}
        except Exception:  # a row's text is the project's code
            said = "%s: the log of the admin has rows by their keys alone"
            logger.exception(said, processor.name)
        texts = [(key_text(pk), name) for pk, name in named.items()]
        _write(user, question.model, texts, message)


def record(user: Any, name: str, message: str) -> None:
    """Log an action on a processor, or ``""``: all; an error as that of ``record_rows()``."""
    who = name or "all processors"
    with _logged(user, who, "", message):
        _write(user, Processor, [(name, who)], message)


@contextmanager
def _logged(user: Any, name: str, what: str, message: str) -> Iterator[None]:
    """Log an error of the block, with what has been done, which no other place has."""
    try:
        yield
    except Exception:  # the admin's log may be in a database of its own
        logger.exception(
            "%s: the admin's log has no entry of what %s has done%s: %s",
            name,
            shown(str(user), LONGEST_TEXT),
            what,
            shown(message, LONGEST),
        )


def recent(name: str, number: int) -> list[LogEntry]:
    """Return the latest actions on a processor, and on all."""
    kind = ContentType.objects.get_for_model(Processor)
    found = LogEntry.objects.filter(content_type=kind, object_id__in=[name, ""])
    return [*found.select_related("user").order_by("-action_time", "-pk")[:number]]


def _write(user: Any, model: type[Model], named: Sequence[tuple[str, str]], message: str) -> None:
    """Write an entry for each row, by its key and its text."""
    kind = ContentType.objects.get_for_model(model)
    # A transaction of the request stays usable after an error.
    with transaction.atomic(using=router.db_for_write(LogEntry)):
        LogEntry.objects.bulk_create(
            LogEntry(
                user_id=user.pk,
                content_type_id=kind.pk,
                object_id=key,
                object_repr=text[:LONGEST_TEXT],
                action_flag=CHANGE,
                change_message=shown(message, LONGEST),
            )
            for key, text in named
        )
