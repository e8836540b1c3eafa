"""System checks: what ``manage.py check`` can find before a run does.

- E001  pending cannot be used
- E002  done, failed, reset or claim names no column, or one that must not be written
- E003  one of them would write the same value twice into unique columns
- E004  one of them holds a value that its column cannot
- E005  two processors have one name
- E006  using names no database
- E007  the database is never committed
- E008  a processor is refused when it is defined
- E009  a column of retry, lease or claimed_at is missing, or of another kind
- E010  two processors of one model share columns that each processor needs for itself
- E011  the columns of a lease, a claim or a retry would keep local time
- E014  max_workers on a database without locks that end with a session
- E015  group_by names no column that can be a key
- E016  the database cannot lock a key
- E017  in_order without an order by the model's own columns
- E018  rate without the app that keeps it
- E019  a list of the admin has a processor of another model
- E020  the __init__ of a processor's class has not called super().__init__()
- W001  pending tests a row that several rows share
- W002  done, failed, reset or claim holds a time that was frozen at import
- W003  pending holds a time that was frozen at import
- W004  a row's transaction locks the whole database
- W006  in_order without retry and failed: a row that always fails stops its key
- W008  a list of the admin edits columns that a processor writes
- W009  a new row is done: the default of a column is the value that done writes
- W010  a processor is defined that the command and the checks do not find
- W011  two processors take rows out of pending by one column
- W012  AT_LEAST_ONCE without retry: a handler cannot tell that a worker died with its row

No check queries a database, unless ``pending()`` itself does. ``ProcessorAdminMixin`` reports E019
and W008 with the checks of its ``ModelAdmin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from dcl_processor.engine import limits
from dcl_processor.exceptions import ProcessorError
from dcl_processor.operator import registry
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor

from . import flips, questions

TAG = "processors"


def register() -> None:
    """Register the checks with Django; ``manage.py check --tag processors`` runs only these."""
    checks.register(check_processors, TAG)


def check_processors(
    app_configs: Iterable[AppConfig] | None = None, **_: Any
) -> list[CheckMessage]:
    """Check the processors of the apps; raise what the import of a ``processors.py`` raises."""
    found, messages = _find(apps.get_app_configs() if app_configs is None else app_configs)
    messages += _shared_names(found)
    return messages + check_found(found)


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
    users: dict[str, list[BatchProcessor[Any]]] = {}
    asking: list[flips.User] = []
    for processor in (each.processor for each in found):
        messages += check_names(processor)
        messages += check_takeover(processor)
        question, about_pending = questions.check(processor)
        messages += about_pending
        if question is not None:
            messages += flips.check(processor, question.model)
            if question.using in connections.databases:  # E006 reports another one
                messages += questions.check_groups(processor, question)
            asking.append((processor, question))
            users.setdefault(question.using, []).append(processor)
    messages += flips.check_shared(asking)
    for alias, processors in users.items():
        messages += check_database(alias, processors)
    return messages


def _find(configs: Iterable[AppConfig]) -> tuple[list[registry.Found], list[CheckMessage]]:
    configs = list(configs)
    found, left_out = registry.survey(configs)
    messages: list[CheckMessage] = []
    for each in left_out:
        sentence, app = str(each.error), each.app
        if isinstance(each, registry.Unfinished):
            messages.append(checks.Error(sentence, obj=app, id="dcl_processor.E020"))
        elif isinstance(each.error, ProcessorError):
            hint = f"It is defined in {app}.{registry.MODULE}, or in a module that it imports."
            messages.append(checks.Error(sentence, hint=hint, obj=app, id="dcl_processor.E008"))
        else:
            raise each.error
    unread = {each.app for each in left_out}
    hidden = [registry.hidden(config) for config in configs if config.name not in unread]
    messages += [
        checks.Warning(
            f"expected a processor that the command and the checks find, got {what}.",
            hint=fix,
            obj=place,
            id="dcl_processor.W010",
        )
        for each in hidden
        for place, what, fix in each
    ]
    return found, messages


def _shared_names(found: Sequence[registry.Found]) -> list[CheckMessage]:
    first: dict[str, registry.Found] = {}
    return [
        checks.Error(
            registry.shared_name(other, each),
            hint="The command and the log identify a processor by its name.",
            obj=each.processor.name,
            id="dcl_processor.E005",
        )
        for each in found
        if (other := first.setdefault(each.processor.name, each)) is not each
    ]


# --- the databases that processors use


def check_names(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    """Yield an error if the processor's alias does not exist."""
    hint = "Add it to DATABASES, or leave the option out: then the router chooses the alias."
    exists = partial(limits.check_alias, processor.using)
    yield from questions.refusals(processor, exists, hint, "dcl_processor.E006")


def check_database(alias: str, processors: Sequence[BatchProcessor[Any]]) -> Iterator[CheckMessage]:
    """Yield what the database cannot do for these processors."""
    if alias not in connections.databases:
        return  # found by E006, or by Django when the queryset is evaluated
    who = f"database {alias!r}"
    connection = connections[alias]
    names = ", ".join(processor.name for processor in processors)
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield checks.Error(
            f"expected autocommit for {names}, got AUTOCOMMIT=False, with which Django never "
            "commits.",
            hint="Set it to True, or give the processors an alias of their own with using=.",
            obj=who,
            id="dcl_processor.E007",
        )
    if not connection.features.has_select_for_update:
        # The other deliveries hold no lock while a handler runs, and their workers share the work.
        inside = [p.name for p in processors if p.is_transactional]
        if inside:
            yield checks.Warning(
                f"this database has no row locks: all workers of {', '.join(inside)} together "
                "handle one row at a time, and all other writers wait while a handler runs.",
                hint="Keep handlers short and run one worker, choose AT_LEAST_ONCE, whose handlers "
                "hold no lock, or use PostgreSQL, MariaDB or MySQL.",
                obj=who,
                id="dcl_processor.W004",
            )


def check_takeover(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    """Yield a warning if no column shows a handler that another worker had its row before."""
    if processor.lease is not None and processor.retry is None:
        yield checks.Warning(
            "AT_LEAST_ONCE without retry: the handler cannot tell a row whose worker died in the "
            "middle of the work from a new one.",
            hint="Set retry=Retry(…): row.attempts is above 1 for a row that was tried before.",
            obj=processor.name,
            id="dcl_processor.W012",
        )
