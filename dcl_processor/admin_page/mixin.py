"""A mixin for a project's own ``ModelAdmin``: a filter by state, and actions on its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.core.checks import CheckMessage
from django.http import HttpRequest, HttpResponseBase

from dcl_processor.admin_page import permissions
from dcl_processor.checks import check_lists
from dcl_processor.operator.actions import values_to_put_back
from dcl_processor.options.model_columns import written_columns
from dcl_processor.processor import BatchProcessor

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
        from dcl_processor.admin_page.models import Processor  # after the apps are loaded

        may_act = permissions.may_operate(request) and self.has_change_permission(request)
        return may_act and bool(self.admin_site.is_registered(Processor))

    def get_list_filter(self, request: HttpRequest) -> list[Any]:
        """Return the list's filters, and one by state for each processor."""
        # Workers load the project's admin, and need no answers.
        from dcl_processor.admin_page.lists import state_filter

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
    for name, label in permissions.LABELS.items():
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
        from dcl_processor.admin_page import lists  # as above

        may = model_admin.has_operate_permission(request)
        # The list of a proxy asks for the permission on the proxy, and an action for the model's.
        permissions.require(may and permissions.may_act(request, processor))
        return lists.confirm(processor, name, model_admin.admin_site, request, chosen)

    return act
