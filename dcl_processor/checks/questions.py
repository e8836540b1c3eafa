"""Checks of ``pending``, and of the options that depend on its model or its database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage
from django.db import DatabaseError, connections
from django.db.models import ForeignKey, QuerySet
from django.db.models.expressions import Col
from django.db.models.sql import Query

import dcl_processor.engine.refusals as of_a_run
from dcl_processor.checks.messages import error, is_frozen, parts, refusals, warning
from dcl_processor.engine.limits import check_alias
from dcl_processor.exceptions import InvalidPending
from dcl_processor.keys import columns
from dcl_processor.operator.diagnosis import describe
from dcl_processor.options.model_columns import written_columns
from dcl_processor.pending.question import Question, ask
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.observer import Gates, Observers


def check(processor: BatchProcessor[Any]) -> tuple[Question[Any] | None, list[CheckMessage]]:
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
    wrong += [*_check_frozen(processor, query), *_check_shared(processor, query)]
    if question.using in connections.databases:  # E006 reports another one
        wrong += _check_database(processor, question)
    return question, wrong


def _check_options(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    yield from refusals("E006", processor, check_alias, processor.using)
    gates = Gates(processor, Observers(processor, ""))
    yield from refusals("E018", processor, of_a_run.refuse_without_rate, processor, gates)
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


def _check_shared(processor: BatchProcessor[Any], query: Query) -> Iterator[CheckMessage]:
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
    yield from refusals("E011", processor, of_a_run.refuse_local_time, processor, connection)
    given = processor, connection, processor.concurrency
    yield from refusals("E014", processor, of_a_run.refuse_small_pool, *given)

    def refuse_keys() -> None:
        columns.refuse_order(processor, question.unfiltered)
        columns.claims_of(processor, model, question.using)
        columns.reads_of(processor, model, question.using)

    yield from refusals("E015", processor, refuse_keys)


def check_lists(
    model_admin: Any, processors: Sequence[BatchProcessor[Any]]
) -> Iterator[CheckMessage]:
    """Yield what is wrong between a list of the admin and each of its processors."""
    model, kind = model_admin.model, type(model_admin)
    for processor in processors:
        question, _ = check(processor)  # which has a check of its own
        if question is not None and model._meta.concrete_model is not question.model:
            words = (
                f"expected a list of {question.model._meta.label}, whose rows {processor.name} "
                f"handles, got one of {model._meta.label}: a key of it names another row."
            )
            yield error("E019", kind, words, "Name the processor in the list of its own model.")
        written = written_columns(processor, model)
        # What is no name is reported by Django.
        if edited := [name for name in model_admin.list_editable if name in written]:
            words = (
                f"expected list_editable without columns that {processor.name} writes, got "
                f"{', '.join(edited)}: a user who saves the list writes back the values that it "
                "showed, over those that a worker has written since."
            )
            hint = "Remove them; the actions of ProcessorAdminMixin ask a second time."
            yield warning("W008", kind, words, hint)
