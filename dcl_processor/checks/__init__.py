"""System checks: what the definition alone cannot see, of models, columns and databases.

``docs/reference/results.md`` lists them. No check queries a database, unless ``pending()`` itself
does. ``ProcessorAdminMixin`` reports E019 and W008 with the checks of its ``ModelAdmin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from dcl_processor.checks import columns, questions
from dcl_processor.checks.messages import error, warning
from dcl_processor.exceptions import ProcessorError
from dcl_processor.operator import registry
from dcl_processor.processor import BatchProcessor

TAG = "processors"


def register() -> None:
    """Register the checks with Django; ``manage.py check --tag processors`` runs only these."""
    checks.register(check_processors, TAG)


def check_processors(
    app_configs: Iterable[AppConfig] | None = None, **_: Any
) -> list[CheckMessage]:
    """Check the processors of the apps; raise what the import of a ``processors.py`` raises."""
    configs = [*(apps.get_app_configs() if app_configs is None else app_configs)]
    found, left_out = registry.survey(configs)
    return [*_left_out(configs, left_out), *_shared_names(found), *check_found(found)]


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
    """Check each processor, and the databases they use."""
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
    for alias in dict.fromkeys(question.using for _, question in asking):
        if alias in connections.databases:  # E006 reports another one
            messages += _database(alias, [one for one, asked in asking if asked.using == alias])
    return messages


def _left_out(
    configs: Sequence[AppConfig], left_out: Sequence[registry.Broken]
) -> Iterator[CheckMessage]:
    """Yield what no command finds, and why."""
    for each in left_out:
        if isinstance(each, registry.Unfinished):
            yield error("E020", each.app, str(each.error))
        elif isinstance(each.error, ProcessorError):
            place = f"{each.app}.{registry.MODULE}"
            hint = f"It is defined in {place}, or in a module that it imports."
            yield error("E008", each.app, str(each.error), hint)
        else:
            raise each.error
    unread = {each.app for each in left_out}
    for config in configs:
        for place, what, fix in [] if config.name in unread else registry.hidden(config):
            words = f"expected a processor that the command and the checks find, got {what}."
            yield warning("W010", place, words, fix)


def _shared_names(found: Sequence[registry.Found]) -> Iterator[CheckMessage]:
    first: dict[str, registry.Found] = {}
    for each in found:
        name = each.processor.name
        if (other := first.setdefault(name, each)) is not each:
            yield error("E005", name, registry.shared_name(other, each))


def _database(alias: str, processors: Sequence[BatchProcessor[Any]]) -> Iterator[CheckMessage]:
    """Yield what the database cannot do for these processors."""
    who, connection = f"database {alias!r}", connections[alias]
    if not connection.settings_dict["AUTOCOMMIT"]:
        names = ", ".join(each.name for each in processors)
        words = f"expected autocommit for {names}, got AUTOCOMMIT=False: Django never commits."
        yield error("E007", who, words, "Set it to True, or give them an alias of their own.")
    # The other deliveries hold no lock while a handler runs, and their workers share the work.
    inside = [each.name for each in processors if each.is_transactional]
    if inside and not connection.features.has_select_for_update:
        yield warning(
            "W004",
            who,
            f"this database has no row locks: all workers of {', '.join(inside)} together handle "
            "one row at a time, and all other writers wait while a handler runs.",
            "Keep handlers short and run one worker, choose AT_LEAST_ONCE, whose handlers hold no "
            "lock, or use PostgreSQL, MariaDB or MySQL.",
        )
