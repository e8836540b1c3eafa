"""Checks of ``pending``, of the keys of its rows, and of lists in the admin that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError
from django.db.models import ForeignKey, QuerySet
from django.db.models.expressions import Col, Subquery, Value
from django.db.models.lookups import Lookup
from django.db.models.sql import Query
from django.db.models.sql.where import WhereNode
from django.utils import timezone

from dcl_processor.exceptions import InvalidOption, InvalidPending, Unsupported
from dcl_processor.keys.columns import claims_of, column_of
from dcl_processor.operator.diagnosis import describe
from dcl_processor.options.model_columns import written_columns
from dcl_processor.pending.question import Question, ask
from dcl_processor.processor import BatchProcessor


def refusals(
    processor: BatchProcessor[Any], refuse: Callable[[], object], hint: str, number: str
) -> Iterator[CheckMessage]:
    """Yield the error of the check with this number if a run would refuse the processor so."""
    try:
        refuse()
    except (FieldDoesNotExist, DatabaseError):
        return  # E009 reports it; or the database does not answer, which is not for a check
    except (InvalidOption, InvalidPending, Unsupported) as error:
        sentence = str(error).removeprefix(f"{processor.name}: ")
        yield checks.Error(sentence, hint=hint, obj=processor.name, id=number)


def check(processor: BatchProcessor[Any]) -> tuple[Question[Any] | None, list[CheckMessage]]:
    """Return the question, if it can be built, and what is wrong with it."""
    try:
        question = ask(processor.pending, label=processor.name, using=processor.using)
    except DatabaseError:
        return None, []  # it asks a database, which does not answer or has no tables yet
    except InvalidPending as error:
        return None, [_unusable(processor, str(error).removeprefix(f"{processor.name}: "))]
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises is the finding
        return None, [
            _unusable(processor, f"expected pending() to return rows, got {describe(error)}.")
        ]
    query = question.queryset.query
    return question, [*_check_frozen(processor, query), *_check_shared(processor, query)]


def _unusable(processor: BatchProcessor[Any], sentence: str) -> CheckMessage:
    hint = "pending is a queryset that can be narrowed to one row, or a callable that returns one."
    return checks.Error(sentence, hint=hint, obj=processor.name, id="dcl_processor.E001")


def _check_frozen(processor: BatchProcessor[Any], query: Query) -> Iterator[CheckMessage]:
    source: Any = processor.pending
    if not isinstance(source, QuerySet):
        return  # called for each window, so its times are fresh
    frozen = {str(part) for part in parts(query) if is_frozen(part)}
    for value in sorted(frozen):
        yield checks.Warning(
            f"pending compares with {value}, which was read from the clock at import and does not "
            "change.",
            hint="Give a callable, which is called for every window: pending=lambda: ….",
            obj=processor.name,
            id="dcl_processor.W003",
        )


def _check_shared(processor: BatchProcessor[Any], query: Query) -> Iterator[CheckMessage]:
    if processor.done is not None or processor._writes("get_done"):
        return  # the row leaves pending by its own columns, as every run verifies
    nodes = parts(query.where, into_queries=False)
    shared = {label for node in nodes for label in _shared_models(query, node)}
    for label in sorted(shared):
        yield checks.Warning(
            f"pending tests {label} across a foreign key, and several rows may share one row "
            "there: two workers can handle them at the same time, because a worker locks only the "
            "row that it handles.",
            hint=(
                "If the handler changes the row itself, name the column in done. If it changes the "
                f"shared row, write the processor over {label}."
            ),
            obj=processor.name,
            id="dcl_processor.W001",
        )


def _shared_models(query: Query, node: Any) -> Iterator[str]:
    if isinstance(node, Col):
        yield from _shared_by(query, node.alias)
    elif isinstance(node, Lookup) and isinstance(node.rhs, Query) and node.rhs.where.children:
        target = getattr(node.lhs, "target", None)
        if _is_shared(target) and node.rhs.model is not None:
            yield node.rhs.model._meta.label


def _shared_by(query: Query, alias: str | None) -> list[str]:
    """Return the model that the alias reaches over a key that several rows may have."""
    reached = query.alias_map.get(alias or "")
    join: Any = reached
    while join is not None and join.parent_alias is not None:
        if _is_shared(join.join_field):
            return [join.join_field.remote_field.model._meta.label]
        join = query.alias_map.get(join.parent_alias)
    return []


def _is_shared(field: Any) -> bool:
    return isinstance(field, ForeignKey) and not field.unique


def parts(node: Any, *, into_queries: bool = True) -> Iterator[Any]:
    """Yield every expression and constant in a query, a condition or an expression."""
    yield node
    children: list[Any] = []
    match node:
        case Query() if into_queries:
            children = [node.where, *node.annotations.values()]
        case WhereNode():
            children = node.children
        case Lookup():
            several = isinstance(node.rhs, list | tuple | set | frozenset)
            children = [node.lhs, *(node.rhs if several else [node.rhs])]
        case Value():
            children = [node.value]
        case Subquery():
            children = [node.query]
        case _ if hasattr(node, "get_source_expressions") and not isinstance(node, Query):
            children = [child for child in node.get_source_expressions() if child is not None]
    for child in children:
        yield from parts(child, into_queries=into_queries)


# --- recognises a time that was read from the clock once, at the import of a module


# Modules are imported after this one, or a moment before it.
_STARTED = datetime.now(UTC)
_MARGIN = timedelta(seconds=10)


def is_frozen(value: Any) -> bool:
    """Return whether the constant looks as if it was read from a clock at this process's start.

    People do not write microseconds by hand, except the last one of a day. So microseconds show
    ``now() - timedelta(days=30)`` too.
    """
    if isinstance(value, datetime):
        aware = value if timezone.is_aware(value) else timezone.make_aware(value)
        recent = _STARTED - _MARGIN <= aware <= datetime.now(UTC) + _MARGIN
        return recent or value.microsecond not in (0, 999_999)
    if isinstance(value, date):
        return value in (datetime.now(UTC).date(), datetime.now().astimezone().date())
    return False


def check_groups(processor: BatchProcessor[Any], question: Question[Any]) -> Iterator[CheckMessage]:
    """Yield what keeps the processor's keys from working, or may stop one of them for good."""
    if processor.group_by is None:
        return
    yield from refusals(
        processor,
        partial(column_of, processor, "group_by", question.model),
        "The key is a column of the model, or a forward relation.",
        "dcl_processor.E015",
    )
    yield from refusals(
        processor,
        partial(claims_of, processor, question.model, question.using),
        "Leave group_by out and run one worker, or use PostgreSQL.",
        "dcl_processor.E016",
    )
    if not processor.in_order:
        return
    if processor.retry is None or not processor._has_dead_letter:
        yield checks.Warning(
            "in_order without retry and failed: a row that always fails stops its key for good, "
            "because no row behind it is handled.",
            hint="Set retry=Retry(…) and failed={…}, which takes a row that is given up on out of "
            "pending.",
            obj=processor.name,
            id="dcl_processor.W006",
        )


def check_lists(
    model_admin: Any, processors: Sequence[BatchProcessor[Any]]
) -> Iterator[CheckMessage]:
    """Yield what is wrong between a list and each of its processors.

    An error if the keys of the list name other rows of the processor, and a warning if the list
    lets a user edit columns that the processor writes.
    """
    for processor in processors:
        question, _ = check(processor)  # which has a check of its own
        if question is not None and model_admin.model._meta.concrete_model is not question.model:
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
