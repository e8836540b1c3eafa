"""A filter of the list: the rows of a processor by their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import FieldError
from django.db.models import Exists, OuterRef, QuerySet
from django.http import HttpRequest

from dcl_processor.candidates.question import Question
from dcl_processor.definition.model_columns import shares_keys
from dcl_processor.diagnosis import explain
from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights import rows
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

Find = Callable[[BatchProcessor[Any], Question[Any]], rows.Rows]

#: The states, and how their rows are found.
STATES: Mapping[str, tuple[str, Find]] = {
    "pending": ("Pending", lambda _, question: question.queryset),
    "due": ("Due now", rows.due),
    "later": ("Due later", rows.later),
    "in_progress": ("In progress", lambda of, asked: rows.in_progress(of, asked, default_age(of))),
    "in_doubt": ("In doubt", lambda of, asked: rows.in_doubt(of, asked, default_age(of))),
    "given_up": ("Given up", rows.given_up),
}


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
            (name, label)
            for name, (label, find) in STATES.items()
            if _found(find, self.processor, question) is not None
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the state; none, with a message, if it cannot be found out."""
        wanted = self.value()
        if wanted is None or wanted not in STATES:
            return queryset
        try:
            question = rows.question_of(self.processor, queryset.db)
            if not shares_keys(queryset.model, question.model):  # as the system checks report
                return queryset.none()
            found = STATES[wanted][1](self.processor, question)
        except (rows.NotRecordedError, ProcessorError, FieldError) as error:
            messages.warning(request, explain(error, self.processor))
            return queryset.none()
        if found is None:
            return queryset.none()
        # By the row's key: the state may be a question with joins of its own.
        return queryset.filter(
            Exists(found.order_by().using(queryset.db).filter(pk=OuterRef("pk")))
        )


def _found(find: Find, processor: BatchProcessor[Any], question: Question[Any]) -> rows.Rows:
    try:
        return find(processor, question)
    except (rows.NotRecordedError, FieldError):  # the system checks report a name of no column
        return None


def state_filter(processor: BatchProcessor[Any]) -> type[StateFilter]:
    """Return the filter of a processor."""
    parameter = "state_of_" + processor.name.replace(".", "_")
    named = {"title": processor.name, "parameter_name": parameter, "processor": processor}
    return type("StateFilterOfProcessor", (StateFilter,), named)
