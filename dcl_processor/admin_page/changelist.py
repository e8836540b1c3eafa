"""A project's own list: its filter by state, and its actions, for a run or for the page."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.sites import AdminSite
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.query import EmptyQuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_text
from dcl_processor.management.wording import LABELS
from dcl_processor.operator.diagnosis import describe, explain
from dcl_processor.operator.time_limit import reading
from dcl_processor.options.model_columns import shares_keys
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown
from dcl_processor.report.report import Report

from . import audit, confirming, views
from .choosing import BUDGET, MOST, ROWS, RefusedError, Wanted, elsewhere
from .models import Processor

#: Rows that one request handles at most: the person waits for their handlers.
MOST_NOW = 100

#: Failures whose errors are shown.
MOST_FAILURES = 5


def process_now(
    processor: BatchProcessor[Any], request: HttpRequest, chosen: QuerySet[Any]
) -> None:
    """Run the processor for the chosen rows, for a few seconds, in this request."""
    pks = list[Any]()
    try:
        pks = _keys(processor, chosen, MOST_NOW + 1)
        wanted = Q(pk__in=pks[:MOST_NOW])
        report = processor.run(filter=wanted, timeout=BUDGET, wait_for_locked=0)
    except RefusedError as refused:
        messages.error(request, str(refused))
        return
    except Exception as error:  # noqa: BLE001  # a sentence for the person who asked
        messages.error(request, shown(f"{processor.name}: {explain(error, processor)}", 500))
        done = getattr(error, "report", None)
        if not isinstance(done, Report):
            return
        report = done
    taken = pks[:MOST_NOW]
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
    """Return the page that asks whether to go on."""
    page: Any = site.get_model_admin(Processor)
    try:
        keys = [key_text(pk) for pk in _keys(processor, chosen, MOST + 1)]
        context = confirming.to_confirm(request, processor, action, Wanted(ROWS), keys)
    except RefusedError as refused:
        messages.error(request, str(refused))
        return redirect(request.get_full_path())
    except Exception as error:  # noqa: BLE001  # a sentence, for instance of a database that is down
        messages.error(request, shown(f"{processor.name}: {explain(error, processor)}", 500))
        return redirect(request.get_full_path())
    return views.confirmation(page, request, processor, context)


def _keys(processor: BatchProcessor[Any], chosen: QuerySet[Any], most: int) -> list[Any]:
    if why := elsewhere(processor, chosen):
        raise RefusedError(why)
    with reading(chosen.db, BUDGET):
        return [*chosen.order_by("pk").values_list("pk", flat=True)[:most]]


# --- the filter


class StateFilter(admin.SimpleListFilter):
    """Narrows a list to the rows that are in a state of a processor."""

    processor: BatchProcessor[Any]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002  # Django's signature
        """Return the states that a row of the processor can be in."""
        try:
            question = rows.question_of(self.processor, None)
        except Exception:  # noqa: BLE001  # the page of the processor has the reason
            return []
        return [
            (name, LABELS[name].capitalize())
            for name in rows.STATES
            if _can_be(name, self.processor, question)
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the state; none, with a message, if it cannot be found out."""
        wanted = self.value()
        if wanted is None or wanted not in rows.STATES:
            return queryset
        try:
            question = rows.question_of(self.processor, queryset.db)
            if not shares_keys(queryset.model, question.model):  # as the system checks report
                return queryset.none()
            found = rows.in_state(wanted, self.processor, question)
        except (rows.NotRecordedError, ProcessorError) as error:
            messages.warning(request, explain(error, self.processor))
            return queryset.none()
        # By the row's key: the state may be a question with joins of its own.
        return queryset.filter(
            Exists(found.order_by().using(queryset.db).filter(pk=OuterRef("pk")))
        )


def _can_be(state: str, processor: BatchProcessor[Any], question: Question[Any]) -> bool:
    try:
        return not isinstance(rows.in_state(state, processor, question), EmptyQuerySet)
    except rows.NotRecordedError:
        return False


def state_filter(processor: BatchProcessor[Any]) -> type[StateFilter]:
    """Return the filter of a processor."""
    parameter = "state_of_" + processor.name.replace(".", "_")
    named = {"title": processor.name, "parameter_name": parameter, "processor": processor}
    return type("StateFilterOfProcessor", (StateFilter,), named)
