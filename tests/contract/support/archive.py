"""A fourth delivery: lock, work, copy the row to an archive, delete it, commit.

``pytest -p tests.contract.support.archive`` gives it to all processors that choose no delivery.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.serializers import serialize

from dcl_processor.definition import kinds
from dcl_processor.definition.definition import Definition
from dcl_processor.delivery import deliveries, in_transaction
from dcl_processor.delivery.batch import Batch
from dcl_processor.execution.handler import Handled
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.transaction_guard import TransactionGuard


def archive(batch: Batch[Any]) -> None:
    table = batch.question.table
    with ReadCommitted(table.db):
        claimed = claim(batch.question, batch.wanted)
        batch.take(claimed)
        if claimed.rows:
            batch.rehearse()
            with TransactionGuard(table.db, claimed.transaction_id) as guard:
                in_transaction.handle(batch, guard)
                in_transaction.settle(batch, guard)
            handled = [pk for pk, each in batch.outcomes.items() if isinstance(each, Handled)]
            rows = table.filter(pk__in=handled)
            archived = apps.get_model("tests", "Archived")
            kept = [archived(row=serialize("python", [row])[0]) for row in rows]
            archived.objects.using(table.db).bulk_create(kept)
            rows.delete()


def pytest_configure() -> None:
    kinds.RULES["archive"] = kinds.Rules(in_transaction=True)
    deliveries.DELIVERIES["archive"] = archive
    Definition.delivery = "archive"  # type: ignore[assignment]  # which is no member of Delivery
