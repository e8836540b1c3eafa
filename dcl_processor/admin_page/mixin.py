"""A mixin for a project's own ``ModelAdmin``: states, retry columns, and actions on its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.core.checks import CheckMessage
from django.db import connections, router, transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from dcl_processor.admin_page import permissions
from dcl_processor.checks.questions import check_lists
from dcl_processor.operator.actions import values_to_put_back
from dcl_processor.options.model_columns import written_columns
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
    Form = forms.ModelForm[Any]
else:
    Base = Form = object

#: Characters of an error that are shown.
LONGEST = 300


class ProcessorAdminMixin(Base):
    """Adds to a ``ModelAdmin`` what an operator needs, for each of ``processors``.

    A filter by state; the columns of ``retry``, and a link that shows why a row is handled or not,
    and who holds it; the columns of ``retry``, claims, flips and leases read-only in the form of an
    existing row; the actions "put back", "mark as done" and "discard", for users with the
    permission ``dcl_admin.operate_processors`` and the model's own ``change``.

    ``processors``: processors of the model. Needs ``dcl_processor.admin_page`` in
    ``INSTALLED_APPS``; on a site where its page is not registered there are no links and no
    actions.
    """

    processors: ClassVar[Sequence[BatchProcessor[Any]]] = ()

    #: The number of all rows is a slow question, and no one needs it.
    show_full_result_count = False

    def __init__(self, model: Any, admin_site: Any) -> None:
        super().__init__(model, admin_site)
        self.form = new_class(self.form.__name__, (RemembersTheRow, self.form))
        if self.actions is not None:
            ours = (_actions(each, at) for at, each in enumerate(self.processors))
            self.actions = [*self.actions, *chain.from_iterable(ours)]

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return what ``manage.py check`` reports of the list."""
        return [*super().check(**kwargs), *check_lists(self, self.processors)]

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may act on the processors' rows, and change the model's."""
        may_act = permissions.may_operate(request) and self.has_change_permission(request)
        return may_act and self._has_page()

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the list's columns, and those of the retry; errors by their beginnings."""
        given = super().get_list_display(request)
        errors = self._error_columns()
        added = [name for name in self._retry_columns() if name not in errors]
        shown_ = ["last_error_shown"] if errors and errors[0] not in given else []
        links = ["processor_links"] if self._has_links(request) else []
        ours = (*added, *shown_, *links)
        return [*given, *(each for each in ours if each not in given)]

    def get_list_filter(self, request: HttpRequest) -> list[Any]:
        """Return the list's filters, and one by state for each processor."""
        # Workers load the project's admin, and need no answers.
        from dcl_processor.admin_page.lists import state_filter

        return [*super().get_list_filter(request), *map(state_filter, self.processors)]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return the fields that workers write, besides those that were read-only before."""
        ours = self._retry_columns()
        if obj is not None:
            # A worker may settle the row while a person edits it, and the form
            # would write back what it showed: the row would be pending again.
            ours += self._marks()
        ours = list(dict.fromkeys(ours))
        links = ["processor_links"] if self._has_links(request) else []
        given = super().get_readonly_fields(request, obj)
        return [*given, *(each for each in (*ours, *links) if each not in given)]

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        """Return the form of a row in the list, which remembers the row."""
        return super().get_changelist_form(request, **{"form": RowForm, **kwargs})

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save what the person has edited, and leave what workers have written since.

        The form has read the row without a lock. Saved as it is, it would write back the flag that
        a worker has flipped meanwhile, and the row would be handled again.
        """
        with transaction.atomic(using=router.db_for_write(self.model, instance=obj)):
            if change:
                merge(obj, form, self._marks())
            super().save_model(request, obj, form, change)

    @admin.display(description="last error")
    def last_error_shown(self, row: Any) -> str:
        """Return the beginning of the last error, masked, in one line."""
        columns = self._error_columns()
        return shown(getattr(row, columns[0]) or "", LONGEST) if columns else ""

    @admin.display(description="why, and who holds it")
    def processor_links(self, row: Any) -> SafeString | str:
        """Return links to what is known of the row, one for each processor."""
        if row is None or row.pk in {None, ""}:  # an address has no empty part
            return ""
        return format_html_join(
            " ",
            '<a href="{}">{}</a>',
            (
                (_address(self.admin_site.name, each, row), each.name.rpartition(".")[2])
                for each in self.processors
            ),
        )

    def _error_columns(self) -> list[str]:
        found = [each.retry.last_error for each in self.processors if each.retry]
        return self._known(found)

    def _has_page(self) -> bool:
        from dcl_processor.admin_page.models import Processor

        return bool(self.admin_site.is_registered(Processor))

    def _has_links(self, request: HttpRequest) -> bool:
        """Return whether the rows of this list are those that the page shows."""
        from dcl_processor.admin_page.lists import elsewhere  # as above

        if not (permissions.may_view(request) and self._has_page()):
            return False
        listed = self.get_queryset(request)
        with suppress(Exception):  # the page has the reason
            return not any(elsewhere(each, listed) for each in self.processors)
        return True

    def _marks(self) -> list[str]:
        """Return the fields that workers write, as far as they are known."""
        return [name for each in self.processors for name in written_columns(each, self.model)]

    def _retry_columns(self) -> list[str]:
        columns = [name for each in self.processors if each.retry for name in each.retry.columns]
        return self._known(columns)

    def _known(self, names: Iterable[str | None]) -> list[str]:
        """Return the names of columns, each once; ``manage.py check`` reports the other names."""
        fields = {field.name for field in self.model._meta.concrete_fields}
        return [name for name in dict.fromkeys(filter(None, names)) if name in fields]


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


def _address(site: str, processor: BatchProcessor[Any], row: Any) -> str:
    from dcl_processor.insights.rows import key_text  # as above

    return reverse(
        "admin:dcl_admin_processor_row",
        args=[quote(processor.name), quote(key_text(row.pk))],
        current_app=site,
    )


# --- saves the form of a row over the row as it is now, and not as the form has read it


class RemembersTheRow(Form):
    """A part of a form that keeps the columns of its row, before any code changes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dcl_loaded = columns_of(self.instance)


class RowForm(RemembersTheRow, forms.ModelForm):  # type: ignore[type-arg]
    """The form of a row in a list."""


def columns_of(row: Model) -> dict[str, Any]:
    """Return the columns of a row that are loaded, as they are now."""
    loaded = vars(row)
    names = (field.attname for field in row._meta.concrete_fields)
    return {
        name: deepcopy(value) if isinstance(value := loaded[name], (dict, list)) else value
        for name in names
        if name in loaded
    }


def merge(row: Model, form: Any, written: list[str]) -> None:
    """Lock the row, and take over what others have written to it since the form has read it.

    Left are the columns of fields that were sent with another value than the form has read, and
    those to which the project's code has given another value. A field is sent with the value that
    the page showed: what was written after the page was loaded, and before the form has read its
    row, is written back. ``written``: the columns that are taken over if the form has not kept
    those of its row, because the project makes its forms in another way.
    """
    using = router.db_for_write(type(row), instance=row)
    loaded = getattr(form, "dcl_loaded", None)
    if loaded is None:
        loaded = {name: value for name, value in columns_of(row).items() if name in written}
    keys = {field.attname for field in row._meta.pk_fields}
    fields = [each for each in row._meta.concrete_fields if each.attname in {*loaded} - keys]
    no_key = connections[using].features.has_select_for_no_key_update
    # Race: double claim. Until this lock is there, a worker may settle the row.
    rows: QuerySet[Any] = QuerySet(type(row), using=using).select_for_update(no_key=no_key)
    now = rows.only(*(each.name for each in fields)).filter(pk=row.pk).first()
    for field in fields if now is not None else ():
        if not _is_edited(row, field, form, loaded):
            setattr(row, field.attname, getattr(now, field.attname))


def _is_edited(row: Model, field: Any, form: Any, loaded: dict[str, Any]) -> bool:
    if field.name in form.changed_data:
        return True
    read = loaded[field.attname]
    if field.name in form.fields:
        # A widget may show less than the column has, as with the fractions of a second.
        read = form.cleaned_data.get(field.name, read)
    if isinstance(read, Model):
        read = getattr(read, field.target_field.attname)
    return bool(getattr(row, field.attname) != read)
