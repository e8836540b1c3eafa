"""The lock of a key that is a foreign key: the row lock of the related row.

It is a statement of its own, about the related row alone. If one statement locked both rows, a row
whose related row is locked would be passed, and would stay locked by the session that passed it.

With multi-table inheritance a related row has a part in each table that its ``save()`` writes, and
each part is locked: another session may write to one of them alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Key

from .engines import refuse_without_transactions
from .waiting import parts_of


def lock_related(question: Question[Any], key: Key, *, wait: bool) -> bool:
    """Lock the related row until the end of the transaction; return whether that was possible.

    ``wait``: wait for another session that has it, so that only a row that is gone returns false.
    """
    target = key.groups.field.target_field
    related = key.groups.field.related_model._meta.concrete_model
    refuse_without_transactions(replace(question, model=related))
    rows = QuerySet[Any](related, using=question.using).filter(**{target.attname: key.value})
    parts = parts_of(related)
    if len(parts) == 1:
        return _lock(rows, wait=wait)
    # Race: two of one key. A session that writes to one table has only the part in it locked.
    return any(
        all(
            _lock(QuerySet[Any](table, using=question.using).filter(pk=pk), wait=wait)
            for table, pk in zip(parts, pks, strict=True)
        )
        for pks in list(rows.order_by().values_list(*parts.values()))
    )


def _lock(rows: QuerySet[Any, Any], *, wait: bool) -> bool:
    """Lock the rows in one table; return whether there was one that could be locked."""
    # Race: two of one key. Another session that has the row may have claimed a row of the key.
    locking = rows.order_by().select_for_update(
        skip_locked=not wait,
        # Child rows refer to it, and others can insert such rows meanwhile.
        no_key=connections[rows.db].features.has_select_for_no_key_update,
    )
    return bool(list(locking.values_list(rows.model._meta.pk_fields[0].attname)))
