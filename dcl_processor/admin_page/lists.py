"""A project's own list: its filter by state, and its actions, which the page confirms."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.sites import AdminSite
from django.db.models import Exists, OuterRef, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from dcl_processor.admin_page import views
from dcl_processor.admin_page.acting import BUDGET, MOST, RefusedError, Wanted
from dcl_processor.admin_page.models import Processor
from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_text
from dcl_processor.management.printing import LABELS
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.time_limit import reading
from dcl_processor.pending.question import for_write
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown


def confirm(
    processor: BatchProcessor[Any],
    action: str,
    site: AdminSite,
    request: HttpRequest,
    chosen: QuerySet[Any],
) -> HttpResponseBase:
    """Return the page that asks whether to go on with the rows that were chosen in a list."""
    page: Any = site.get_model_admin(Processor)
    try:
        refuse_elsewhere(processor, chosen)
        with reading(chosen.db, BUDGET):
            pks = [*chosen.order_by("pk").values_list("pk", flat=True)[: MOST + 1]]
        wanted = Wanted(action, "rows", None, [key_text(pk) for pk in pks])
        return views.confirmation(page, request, processor, wanted)
    except RefusedError as refused:
        messages.error(request, str(refused))
    except Exception as error:  # noqa: BLE001  # a sentence, for instance of a database that is down
        messages.error(request, shown(f"{processor.name}: {explain(error, processor)}", 500))
    return redirect(request.get_full_path())


def refuse_elsewhere(processor: BatchProcessor[Any], listed: QuerySet[Any]) -> None:
    """Raise ``RefusedError`` unless the rows of a list are the processor's.

    A key names another row in another table, and in another database.
    """
    question = rows.question_of(processor, None)
    ours = question.model, question.using
    # That of writes: a list may read from replicas.
    theirs = listed.model._meta.concrete_model, for_write(listed.all()).db
    if theirs != ours:
        raise RefusedError(
            f"{processor.name}: expected a list of {_named(*ours)}, whose rows the processor "
            f"handles, got one of {_named(*theirs)}; name the processor in the list of its own "
            "model, and let get_queryset() return its database's rows."
        )


def _named(model: Any, using: str) -> str:
    return f"{model._meta.label} in the database {using!r}"


class StateFilter(admin.SimpleListFilter):
    """Narrows a list to the rows that are in a state of a processor."""

    processor: BatchProcessor[Any]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002  # Django's signature
        """Return the states."""
        return [(name, LABELS[name].capitalize()) for name in rows.STATES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the state; none, with a message, if it cannot be found out."""
        wanted = self.value()
        if wanted not in rows.STATES:
            return queryset
        try:
            question = rows.question_of(self.processor, queryset.db)
            found = rows.in_state(wanted, self.processor, question)
        except (rows.NotRecordedError, ProcessorError) as error:
            messages.warning(request, explain(error, self.processor))
            return queryset.none()
        # By the row's key: the state may be a question with joins of its own.
        mine = found.order_by().using(queryset.db).filter(pk=OuterRef("pk"))
        return queryset.filter(Exists(mine))


def state_filter(processor: BatchProcessor[Any]) -> type[StateFilter]:
    """Return the filter of a processor."""
    parameter = "state_of_" + processor.name.replace(".", "_")
    named = {"title": processor.name, "parameter_name": parameter, "processor": processor}
    return type("StateFilterOfProcessor", (StateFilter,), named)
