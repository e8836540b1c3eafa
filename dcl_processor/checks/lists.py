"""Checks of lists in the admin: whose rows they show, and which columns their forms save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage

from dcl_processor.definition.model_columns import shares_keys, written_columns
from dcl_processor.processor import BatchProcessor

from . import questions


def check(model_admin: Any, processors: Sequence[BatchProcessor[Any]]) -> Iterator[CheckMessage]:
    """Yield what is wrong between a list and each of its processors.

    An error if the keys of the list name other rows of the processor, and a warning if the list
    lets a user edit columns that the processor writes.
    """
    for processor in processors:
        question, _ = questions.check(processor)  # which has a check of its own
        if question is not None and not shares_keys(model_admin.model, question.model):
            yield checks.Error(
                f"expected a list of {question.model._meta.label}, whose rows {processor.name} "
                f"handles, got one of {model_admin.model._meta.label}: a key of it names another "
                "row.",
                hint="Name the processor in the list of its own model.",
                obj=type(model_admin),
                id="dcl_processor.E019",
            )
        written = written_columns(processor, model_admin.model)
        # What is no name is reported by Django.
        edited = [name for name in model_admin.list_editable if name in written]
        if edited:
            yield checks.Warning(
                f"expected list_editable without columns that {processor.name} writes, got "
                f"{', '.join(edited)}: a user who saves the list writes back the values that it "
                "showed, over those that a worker has written since.",
                hint="Remove them from list_editable. The actions of ProcessorAdminMixin change "
                "such columns after a second check.",
                obj=type(model_admin),
                id="dcl_processor.W008",
            )
