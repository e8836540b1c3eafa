"""The actions of a list: to run for the chosen rows, or to hand them over to the page."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.sites import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from dcl_processor.database.time_limit import reading
from dcl_processor.diagnosis import describe, explain
from dcl_processor.masking import shown
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

from . import audit, confirming, views
from .choosing import BUDGET, MOST, ROWS, Wanted, elsewhere
from .models import Processor

#: Rows that one request handles at most: the person waits for their handlers.
MOST_NOW = 100

#: Failures whose errors are shown.
MOST_FAILURES = 5


def process_now(
    processor: BatchProcessor[Any], request: HttpRequest, chosen: QuerySet[Any]
) -> None:
    """Run the processor for the chosen rows, for a few seconds, in this request."""
    taken = list[Any]()
    try:
        pks = _keys(processor, chosen, MOST_NOW + 1)
        taken = pks[:MOST_NOW]
        report = processor.run(filter=Q(pk__in=taken), timeout=BUDGET, wait_for_locked=0)
    except confirming.RefusedError as refused:
        messages.error(request, str(refused))
        return
    except BaseException as error:
        said = shown(f"{processor.name}: {explain(error, processor)}", 500)
        done = getattr(error, "report", None)
        if isinstance(done, Report) and done.did_something:
            message = f"Process now, which ended with an error. {said}"
            audit.record_rows(request.user, processor, taken, message, total=len(taken))
        if not isinstance(error, Exception):
            raise
        messages.error(request, said)  # a sentence for the person who asked
        return
    if report.did_something:
        message = f"Process now, for {len(taken)} rows. {report}"
        audit.record_rows(request.user, processor, taken, message, total=len(taken))
    _show(request, report)
    if len(pks) > MOST_NOW or report.stopped == "timeout":
        said = f"Not all rows were tried: one request takes {MOST_NOW} rows, and {BUDGET:g} s."
        messages.warning(request, said)


def _show(request: HttpRequest, report: Report) -> None:
    messages.add_message(request, messages.SUCCESS if report.ok else messages.WARNING, str(report))
    if report.error is not None:
        messages.error(request, shown(describe(report.error), 500))
    for failure in report.failures[:MOST_FAILURES]:
        messages.error(request, f"Row {failure.pk}: {shown(describe(failure.error), 300)}")


def confirm(
    processor: BatchProcessor[Any],
    action: str,
    site: AdminSite,
    request: HttpRequest,
    chosen: QuerySet[Any],
) -> HttpResponseBase | None:
    """Return the page that asks whether to go on; it acts in chunks, however many were chosen."""
    admin: Any = site.get_model_admin(Processor)
    try:
        pks = _keys(processor, chosen, MOST + 1)
        context = confirming.to_confirm(request, processor, action, Wanted(ROWS), pks)
    except confirming.RefusedError as refused:
        messages.error(request, str(refused))
        return redirect(request.get_full_path())
    except Exception as error:  # noqa: BLE001  # a sentence, for instance of a database that is down
        messages.error(request, shown(f"{processor.name}: {explain(error, processor)}", 500))
        return redirect(request.get_full_path())
    return views.confirmation(admin, request, processor, context)


def _keys(processor: BatchProcessor[Any], chosen: QuerySet[Any], most: int) -> list[Any]:
    if why := elsewhere(processor, chosen):
        raise confirming.RefusedError(why)
    with reading(chosen.db, BUDGET):
        return [*chosen.order_by("pk").values_list("pk", flat=True)[:most]]
