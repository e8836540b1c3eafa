"""Checks of the columns that processors write: ``done``, ``failed``, ``reset``, ``claim``, …."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ValidationError
from django.db.models import Field, Model
from django.db.models.expressions import Col

from dcl_processor.checks.messages import error, is_frozen, parts, refusals, warning
from dcl_processor.options.model_columns import (
    check_columns,
    check_own_columns,
    own_columns,
    written,
)
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.values import constants_of

User = tuple[BatchProcessor[Any], Question[Any]]


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for option, values in written(processor):
        given = values, model, processor.name, option
        yield from (wrong := [*refusals("E002", processor, check_columns, *given)])
        for name, value in constants_of({} if wrong else values).items():
            yield from _check_constant(processor.name, option, columns[name], value)
    yield from refusals("E009", processor, check_own_columns, processor, model)


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
    return [name for name in own_columns(processor) if name != last_error]
