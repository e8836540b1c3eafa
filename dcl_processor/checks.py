"""System checks: what the definition alone cannot see, of models, columns and databases.

``docs/reference/results.md`` lists them. No check queries a database, unless ``pending()`` itself
does. ``ProcessorAdminMixin`` reports E019 and W008 with the checks of its ``ModelAdmin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import combinations
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import DatabaseError, connections
from django.db.models import Field, ForeignKey, Model, QuerySet
from django.db.models.expressions import Col, Value
from django.db.models.lookups import Lookup
from django.db.models.sql import Query

import dcl_processor.engine.refusals as of_a_run
import dcl_processor.keys.columns as keys
from dcl_processor.engine.limits import check_alias
from dcl_processor.exceptions import InvalidOption, InvalidPending, ProcessorError
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import describe
from dcl_processor.options import model_columns
from dcl_processor.pending.question import Question, ask
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.observer import Gates, Observers
from dcl_processor.report.values import constants_of

TAG = "processors"

User = tuple[BatchProcessor[Any], Question[Any]]


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
    asking: list[User] = []
    for processor in (each.processor for each in found):
        question, wrong = check_question(processor)
        messages += wrong
        if question is not None:
            messages += check_columns(processor, question.model)
            asking.append((processor, question))
    for one, other in combinations(asking, 2):
        messages += check_shared(one, other)
    return messages


# --- what checks say, and what they look for in a query


def error(number: str, obj: Any, sentence: str, hint: str | None = None) -> CheckMessage:
    """Return what would fail, or be wrong, in a run."""
    return checks.Error(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def warning(number: str, obj: Any, sentence: str, hint: str) -> CheckMessage:
    """Return what may not be what the user intends."""
    return checks.Warning(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def refused_by(
    number: str, processor: BatchProcessor[Any], refuse: Callable[..., Any], *given: Any
) -> Iterator[CheckMessage]:
    """Yield the error of the check with this number if a run would refuse the processor so."""
    try:
        refuse(*given)
    except (FieldDoesNotExist, DatabaseError):
        return  # E009 reports it; or the database does not answer, which is not for a check
    except ProcessorError as refused:
        sentence = str(refused).removeprefix(f"{processor.name}: ")
        yield error(number, processor.name, sentence)


def is_frozen(value: Any) -> bool:
    """Return whether the constant looks like a time that was read from a clock at an import.

    People write no microseconds by hand, except the last one of a day.
    """
    return isinstance(value, datetime) and value.microsecond not in (0, 999_999)


def parts(node: Any) -> Iterator[Any]:
    """Yield every expression and constant in a query, a condition or an expression."""
    yield node
    children: list[Any] = [*getattr(node, "children", ())]
    if isinstance(node, Query):
        children = [node.where, *node.annotations.values()]
    elif isinstance(node, Lookup):
        children = [node.lhs, *(node.rhs if isinstance(node.rhs, list | tuple) else [node.rhs])]
    elif isinstance(node, Value):
        children = [node.value]
    elif hasattr(node, "get_source_expressions"):
        children += [getattr(node, "query", None), *node.get_source_expressions()]
    for child in children:
        yield from parts(child)


# --- pending, and the options that depend on its model or its database


def check_question(
    processor: BatchProcessor[Any],
) -> tuple[Question[Any] | None, list[CheckMessage]]:
    """Return the question, if it can be built, and what is wrong with it, and with the options."""
    wrong, sentence = [*_check_options(processor)], ""
    question: Any = None
    try:
        question = ask(processor.pending, label=processor.name, using=processor.using)
    except DatabaseError:
        return None, wrong  # it asks a database, which does not answer or has no tables yet
    except InvalidPending as refused:
        sentence = str(refused).removeprefix(f"{processor.name}: ")
    except Exception as raised:  # noqa: BLE001  # whatever the user's code raises is the finding
        sentence = f"expected pending() to return rows, got {describe(raised)}."
    if sentence:
        return None, [*wrong, error("E001", processor.name, sentence)]
    query = question.queryset.query
    wrong += [*_check_frozen(processor, query), *_check_joined(processor, query)]
    if question.using in connections.databases:  # E006 reports another one
        wrong += _check_database(processor, question)
    return question, wrong


def _check_options(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    yield from refused_by("E006", processor, check_alias, processor.using)
    gates = Gates(processor, Observers(processor, ""))
    yield from refused_by("E018", processor, of_a_run.refuse_without_rate, processor, gates)
    if processor.lease is not None and processor.retry is None:
        words = (
            "AT_LEAST_ONCE without retry: the handler cannot tell a row whose worker died in the "
            "middle of the work from a new one."
        )
        hint = "Set retry=Retry(…): row.attempts is above 1 for a row that was tried before."
        yield warning("W012", processor.name, words, hint)


def _check_frozen(processor: BatchProcessor[Any], query: Query) -> Iterator[CheckMessage]:
    source: Any = processor.pending
    # What is called is called for each window, so that its times are fresh.
    frozen = {str(p) for p in parts(query) if is_frozen(p)} if isinstance(source, QuerySet) else ()
    for value in sorted(frozen):
        words = f"pending compares with {value}, which was read from the clock at import."
        hint = "Give a callable, which is called for every window: pending=lambda: …."
        yield warning("W003", processor.name, words, hint)


def _check_joined(processor: BatchProcessor[Any], query: Query) -> Iterator[CheckMessage]:
    if processor.done is not None or processor._writes("get_done"):
        return  # the row leaves pending by its own columns, as every run verifies
    joins = [query.alias_map.get(each.alias) for each in parts(query.where) if type(each) is Col]
    keys = [getattr(each, "join_field", None) for each in joins]
    several = [each for each in keys if isinstance(each, ForeignKey) and not each.unique]
    for label in sorted({each.remote_field.model._meta.label for each in several}):
        words = (
            f"pending tests {label} across a foreign key, and several rows may share one row "
            "there: two workers can handle them at the same time, because a worker locks only the "
            "row that it handles."
        )
        hint = (
            "If the handler changes the row itself, name the column in done. If it changes the "
            f"shared row, write the processor over {label}."
        )
        yield warning("W001", processor.name, words, hint)


def _check_database(
    processor: BatchProcessor[Any], question: Question[Any]
) -> Iterator[CheckMessage]:
    """Yield what every run on this database would refuse."""
    connection, model = connections[question.using], question.model
    yield from refused_by("E011", processor, of_a_run.refuse_local_time, processor, connection)
    given = processor, connection, processor.concurrency
    yield from refused_by("E014", processor, of_a_run.refuse_small_pool, *given)

    def refuse_keys() -> None:
        keys.refuse_order(processor, question.unfiltered)
        keys.claims_of(processor, model, question.using)
        keys.reads_of(processor, model, question.using)

    yield from refused_by("E015", processor, refuse_keys)


# --- the columns that options name


def check_columns(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for option, values in model_columns.written(processor):
        given = values, model, processor.name, option
        yield from (wrong := [*refused_by("E002", processor, model_columns.check_columns, *given)])
        for name, value in constants_of({} if wrong else values).items():
            yield from _check_constant(processor.name, option, columns[name], value)
    yield from refused_by("E009", processor, model_columns.check_own_columns, processor, model)


def _check_constant(
    processor: str, option: str, field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if problem := _problem(field, value):
        words = (
            f"expected {option} to give {field.name} a value that its column can hold, got "
            f"{value!r}: {problem}"
        )
        yield error("E004", processor, words, f"The column is a {type(field).__name__}.")
    if is_frozen(value):
        words = (
            f"{option} writes {value} into {field.name}: the time was read from the clock at "
            "import, so every row gets the same time."
        )
        hint = "Give the function itself, such as timezone.now, or the database's Now()."
        yield warning("W002", processor, words, hint)


def _problem(field: Field[Any, Any], value: Any) -> str:
    """Return why a column cannot hold the value, or an empty string if it can."""
    if value is None:
        return "" if field.null else "the column is NOT NULL"
    if isinstance(value, Model):
        return ""  # for a foreign key, which update() takes as well
    try:
        field.run_validators(field.to_python(value))
    except ValidationError as refused:
        return " ".join(refused.messages)
    except (TypeError, ValueError) as refused:
        return str(refused)
    return ""


def check_shared(one: User, other: User) -> Iterator[CheckMessage]:
    """Yield what two processors share, and each needs for itself; no conditions are solved.

    The stages of a pipeline may share the columns of a retry and a lease, which a success clears:
    the ``pending`` of both names a column to which their ``done`` write different constants. A
    claimed row is recognised by the values of ``claim`` alone, so these must differ in any case.
    """
    (first, asked), (second, also_asked) = one, other
    if (asked.using, asked.model) != (also_asked.using, also_asked.model):
        return
    name, label = second.name, asked.model._meta.label
    flags, theirs = _flags(*one), _flags(*other)
    both = flags.keys() & theirs.keys()
    are_stages = any(flags[each] != theirs[each] for each in both)
    shared = [] if are_stages else sorted({*_kept(first)} & {*_kept(second)})
    if first.claim and first.claim == second.claim:
        shared.append(f"claim={dict(first.claim)!r}")
    if shared:
        words = (
            f"expected {name} to write to columns of its own, got {' and '.join(shared)} of {label}"
            f" shared with {first.name}: each processor would read the other's values as its own."
        )
        hint = (
            "Name other columns in Retry(…), Lease(…, field=…) and claimed_at=…, or claim another "
            "value. If no row is ever pending for both, silence dcl_processor.E010."
        )
        yield error("E010", name, words, hint)
    if both and not are_stages:
        words = (
            f"expected {name} and {first.name} to handle different rows, got two processors that "
            f"take rows out of pending by {' and '.join(sorted(both))} of {label}: one of them "
            "alone handles a row."
        )
        hint = "Let each have a column of its own, or tell their rows apart in pending."
        yield warning("W011", name, words, hint)


def _flags(processor: BatchProcessor[Any], question: Question[Any]) -> dict[str, Any]:
    """Return the columns that pending names and done writes, with the constants."""
    where = question.unfiltered.query.where
    tested = {each.target.name for each in parts(where) if isinstance(each, Col)}
    constants = constants_of(processor.done or {})
    return {name: value for name, value in constants.items() if name in tested}


def _kept(processor: BatchProcessor[Any]) -> list[str]:
    """Return the columns that keep when a row may be tried, and which worker has it."""
    last_error = processor.retry.last_error if processor.retry else None
    return [name for name in model_columns.own_columns(processor) if name != last_error]


# --- lists of the admin


def check_lists(
    model_admin: Any, processors: Sequence[BatchProcessor[Any]]
) -> Iterator[CheckMessage]:
    """Yield what is wrong between a list of the admin and each of its processors."""
    model, kind = model_admin.model, type(model_admin)
    for processor in processors:
        question, _ = check_question(processor)  # which has a check of its own
        if question is not None and model._meta.concrete_model is not question.model:
            words = (
                f"expected a list of {question.model._meta.label}, whose rows {processor.name} "
                f"handles, got one of {model._meta.label}: a key of it names another row."
            )
            yield error("E019", kind, words, "Name the processor in the list of its own model.")
        written = model_columns.written_columns(processor, model)
        # What is no name is reported by Django.
        if edited := [name for name in model_admin.list_editable if name in written]:
            words = (
                f"expected list_editable without columns that {processor.name} writes, got "
                f"{', '.join(edited)}: a user who saves the list writes back the values that it "
                "showed, over those that a worker has written since."
            )
            hint = "Remove them; the actions of ProcessorAdminMixin ask a second time."
            yield warning("W008", kind, words, hint)
