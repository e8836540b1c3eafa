"""System checks: what the definition alone cannot see, of models, columns and databases.

``docs/reference/results.md`` lists them. No check queries a database, unless ``pending()`` itself
does. ``ProcessorAdminMixin`` reports E019 and W008 with the checks of its ``ModelAdmin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.core.checks import CheckMessage

from dcl_processor.checks import columns, questions
from dcl_processor.checks.messages import error
from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator import registry
from dcl_processor.processor import BatchProcessor

TAG = "processors"


def register() -> None:
    """Register the checks with Django; ``manage.py check --tag processors`` runs only these."""
    checks.register(check_processors, TAG)


def check_processors(
    app_configs: Iterable[AppConfig] | None = None, **_: Any
) -> list[CheckMessage]:
    """Check the processors of the apps."""
    found, left_out = registry.survey(app_configs or apps.get_app_configs())
    wrong = [error("E008", each.app, str(each)) for each in left_out]
    try:
        registry.processors()
    except InvalidOption as refused:
        wrong.append(error("E005", registry.MODULE, str(refused)))
    return [*wrong, *check_found(found)]


def refusals(chosen: Iterable[BatchProcessor[Any]]) -> dict[str, str]:
    """Return what is wrong with those of the processors that have an error, by their names.

    All processors are checked, because two of them may be wrong together.
    """
    everyone = [registry.Found(each, "") for each in registry.processors().values()]
    names = {each.name for each in chosen}
    errors = [
        each
        for each in check_found(everyone)
        if each.obj in names and each.is_serious() and not each.is_silenced()
    ]
    return {each.obj: f"{each.msg} ({each.id})" for each in reversed(errors)}


def check_found(found: Sequence[registry.Found]) -> list[CheckMessage]:
    """Check each processor, and each two of them."""
    messages: list[CheckMessage] = []
    asking: list[columns.User] = []
    for processor in (each.processor for each in found):
        question, wrong = questions.check(processor)
        messages += wrong
        if question is not None:
            messages += columns.check(processor, question.model)
            asking.append((processor, question))
    for one, other in combinations(asking, 2):
        messages += columns.check_shared(one, other)
    return messages
