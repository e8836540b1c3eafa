"""Saves the form of a row over the row as it is now, and not as the form has read it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from django import forms
from django.db import connections, router
from django.db.models import Model, QuerySet

if TYPE_CHECKING:
    Form = forms.ModelForm[Any]
else:
    Form = object


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
