"""Checks of the databases that processors use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections

from dcl_processor.candidates.question import Question
from dcl_processor.definition.kinds import rules_of
from dcl_processor.locking.slots import refuse_without_locks
from dcl_processor.processor import BatchProcessor
from dcl_processor.runner import limits

from .questions import refusals


def check_names(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    """Yield an error if the processor's alias does not exist."""
    hint = "Add it to DATABASES, or leave the option out: then the router chooses the alias."
    exists = partial(limits.check_alias, "using", processor.using)
    yield from refusals(processor, exists, hint, "dcl_processor.E006")


def check_clock(processor: BatchProcessor[Any], question: Question[Any]) -> Iterator[CheckMessage]:
    """Yield an error if the lease's column keeps a time that will be an hour off some day."""
    if processor.lease is not None:
        hint = "With USE_TZ=True, columns without a time zone store UTC."
        lasts = partial(processor.lease.check_clock, question.model, question.using, processor.name)
        yield from refusals(processor, lasts, hint, "dcl_processor.E011")


def check(alias: str, processors: Sequence[BatchProcessor[Any]]) -> Iterator[CheckMessage]:
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
    for processor in processors:
        if processor.max_workers is not None:
            hint = "Or use one worker: on SQLite, workers wait for each other in any case."
            slots = partial(refuse_without_locks, alias, processor.name)
            yield from refusals(processor, slots, hint, "dcl_processor.E014")
    if not connection.features.has_select_for_update:
        # The other deliveries hold no lock while a handler runs, and their workers share the work.
        inside = [p.name for p in processors if rules_of(p).in_transaction]
        if inside:
            yield checks.Warning(
                f"this database has no row locks: all workers of {', '.join(inside)} together "
                "handle one row at a time, and all other writers wait while a handler runs.",
                hint="Keep handlers short and run one worker, choose AT_LEAST_ONCE, whose handlers "
                "hold no lock, or use PostgreSQL, MariaDB or MySQL.",
                obj=who,
                id="dcl_processor.W004",
            )


def check_ledger(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    """Yield an error for an option that needs the ledger, if there is none, or it is off."""
    has_it = partial(limits.refuse_without_ledger, processor)
    yield from refusals(processor, has_it, "Every run is refused.", "dcl_processor.E018")
