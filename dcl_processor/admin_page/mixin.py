"""A mixin for a project's own ``ModelAdmin``: a filter by state, and actions on its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.sites import AdminSite
from django.core.checks import CheckMessage
from django.db.models import Exists, OuterRef, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from dcl_processor.admin_page import acting, views
from dcl_processor.admin_page.acting import BUDGET, MOST, RefusedError, Wanted
from dcl_processor.admin_page.models import Processor
from dcl_processor.checks import check_lists
from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_text
from dcl_processor.management.printing import LABELS
from dcl_processor.operator.actions import values_to_put_back
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.times import reading
from dcl_processor.options.model_columns import written_columns
from dcl_processor.pending.question import for_write
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = object


class ProcessorAdminMixin(Base):
    """Adds to a ``ModelAdmin`` what an operator needs, for each of ``processors``.

    A filter by state; the columns that workers write read-only in the form of an existing row, and
    left as they are when it is saved; the actions "put back", "mark as done" and "discard", for
    users with the permission ``dcl_admin.operate_processors`` and the model's own ``change``.

    ``processors``: processors of the model. Needs ``dcl_processor.admin_page`` in
    ``INSTALLED_APPS``; on a site where its page is not registered there are no actions.
    """

    processors: ClassVar[Sequence[BatchProcessor[Any]]] = ()

    #: The number of all rows is a slow question, and no one needs it.
    show_full_result_count = False

    def __init__(self, model: Any, admin_site: Any) -> None:
        super().__init__(model, admin_site)
        if self.actions is not None:
            ours = (_actions(each, at) for at, each in enumerate(self.processors))
            self.actions = [*self.actions, *chain.from_iterable(ours)]

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return what ``manage.py check`` reports of the list."""
        return [*super().check(**kwargs), *check_lists(self, self.processors)]

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may act on the processors' rows, and change the model's."""
        may_act = acting.may_operate(request) and self.has_change_permission(request)
        return may_act and bool(self.admin_site.is_registered(Processor))

    def get_list_filter(self, request: HttpRequest) -> list[Any]:
        """Return the list's filters, and one by state for each processor."""
        return [*super().get_list_filter(request), *map(state_filter, self.processors)]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return the fields that workers write, besides those that were read-only before."""
        # A worker may settle the row while a person edits it, and the form would write back what
        # it showed: the row would be pending again.
        ours = self._written() if obj is not None else []
        given = super().get_readonly_fields(request, obj)
        return [*given, *(each for each in ours if each not in given)]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save the row without the columns that workers write."""
        if change:
            for name in self._written():
                # Race: double claim. A worker may have settled the row since the form has read it.
                # Django saves only the columns that are loaded.
                if name not in form.changed_data:
                    vars(obj).pop(self.model._meta.get_field(name).attname, None)
        super().save_model(request, obj, form, change)

    def _written(self) -> list[str]:
        """Return the fields that workers write, as far as options name them."""
        some = chain.from_iterable(written_columns(each, self.model) for each in self.processors)
        return [*dict.fromkeys(some)]


def _actions(processor: BatchProcessor[Any], at: int) -> Iterator[Any]:
    """Yield the actions that the processor's options allow, as Django calls them."""
    for name, label in acting.LABELS.items():
        if name == "requeue" and values_to_put_back(processor) is None:
            continue
        # Django formats a label.
        described = f"{label}: {processor.name}".replace("%", "%%")
        offered = admin.action(permissions=["operate"], description=described)
        act = offered(_act(processor, name))
        act.__name__ = f"dcl_{name}_{at}"
        yield act


def _act(processor: BatchProcessor[Any], name: str) -> Callable[..., HttpResponseBase | None]:
    def act(model_admin: Any, request: HttpRequest, chosen: Any) -> HttpResponseBase | None:
        may = model_admin.has_operate_permission(request)
        # The list of a proxy asks for the permission on the proxy, and an action for the model's.
        acting.require(may and acting.may_act(request, processor))
        return _confirm(processor, name, model_admin.admin_site, request, chosen)

    return act


def _confirm(
    processor: BatchProcessor[Any],
    action: str,
    site: AdminSite,
    request: HttpRequest,
    chosen: QuerySet[Any],
) -> HttpResponseBase:
    """Return the page that asks whether to go on with the rows that were chosen in a list."""
    page: Any = site.get_model_admin(Processor)
    try:
        _refuse_elsewhere(processor, chosen)
        with reading(chosen.db, BUDGET):
            pks = [*chosen.order_by("pk").values_list("pk", flat=True)[: MOST + 1]]
        wanted = Wanted(action, "rows", None, [key_text(pk) for pk in pks])
        return views.confirmation(page, request, processor, wanted)
    except RefusedError as refused:
        messages.error(request, str(refused))
    except Exception as error:  # noqa: BLE001  # a sentence, for instance of a database that is down
        messages.error(request, shown(f"{processor.name}: {explain(error, processor)}", 500))
    return redirect(request.get_full_path())


def _refuse_elsewhere(processor: BatchProcessor[Any], listed: QuerySet[Any]) -> None:
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
