"""A fourth delivery: lock, work, copy the row to an archive, delete it, commit.

``pytest -p tests.contract.support.archive`` gives it to all processors that choose no delivery.
"""

from __future__ import annotations

from django.apps import apps
from django.core.serializers import serialize

from dcl_processor.engine.calls import Handled
from dcl_processor.engine.deliveries import DELIVERIES
from dcl_processor.engine.flips import flips
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.settlement import Batch, Settlement
from dcl_processor.engine.work import handle_locked
from dcl_processor.options import kinds
from dcl_processor.options.options import Definition


def archive(lane: Lane, batch: Batch) -> Settlement:
    """Lock and check again → work → flip → copy → delete → commit."""
    lane.claim(batch)
    handle_locked(lane, batch)
    settlement = flips(lane, batch, may_wait=False)
    handled = [held.pk for held, outcome in batch.ended if isinstance(outcome, Handled)]
    if handled and not lane.session.connection.needs_rollback:
        rows = batch.question.table.filter(pk__in=handled)
        archived = apps.get_model("tests", "Archived")
        kept = [archived(row=serialize("python", [row])[0]) for row in rows]
        archived.objects.using(rows.db).bulk_create(kept)
        rows.delete()
    return settlement


def pytest_configure() -> None:
    kinds.RULES["archive"] = kinds.Rules(in_transaction=True)
    DELIVERIES["archive"] = archive
    Definition.delivery = "archive"  # type: ignore[assignment]  # which is no member of Delivery
