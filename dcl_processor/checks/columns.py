"""Checks of the columns that processors write: ``done``, ``failed``, ``reset``, ``claim``, …."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import BinaryField, Field, Model, TextField, Value
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
from dcl_processor.report.values import constants_of, is_constant

User = tuple[BatchProcessor[Any], Question[Any]]

#: A column, by its database, its table and its name: children share their parents' columns.
Column = tuple[str, str, str]


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for option, values in written(processor):
        hint = "A flip writes the model's own columns, by the names of their fields."
        given = values, model, processor.name, option
        if wrong := [*refusals("E002", processor, hint, check_columns, *given)]:
            yield from wrong
            continue
        plain = {columns[n]: v.value if isinstance(v, Value) else v for n, v in values.items()}
        constants = {field: value for field, value in plain.items() if is_constant(value)}
        yield from _check_unique(processor.name, option, model, constants)
        for field, value in constants.items():
            yield from _check_constant(processor.name, option, field, value)
    hint = "Abstract models with these columns are in dcl_processor.columns."
    yield from refusals("E009", processor, hint, check_own_columns, processor, model)


def _check_unique(
    processor: str, option: str, model: type[Model], constants: Mapping[Any, Any]
) -> Iterator[CheckMessage]:
    """Yield what would fail for the second row only after its handler was called."""
    meta = model._meta
    together = [*meta.unique_together, *(each.fields for each in meta.total_unique_constraints)]
    names = {field.name for field, value in constants.items() if value is not None}
    for columns in [*together, *([f.name] for f in meta.concrete_fields if f.unique)]:
        if names.issuperset(columns):
            words = (
                f"{option} writes the same value into {' and '.join(columns)} of every row, where "
                "values must be unique: the second row would fail."
            )
            hint = "Give a callable or an expression, or, in get_done(), the result."
            yield error("E003", processor, words, hint)


def _check_constant(
    processor: str, option: str, field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if problem := _problem(field, value):
        words = (
            f"expected {option} to give {field.name} a value that its column can hold, got "
            f"{value!r}: {problem}"
        )
        yield error("E004", processor, words, f"The column is a {type(field).__name__}.")
    default = field.get_default() if field.has_default() else field.db_default
    # False, which clears a "dirty" flag, may be the default.
    if option == "done" and value is True and getattr(default, "value", default) is True:
        words = (
            f"done writes True into {field.name}, and True is the default of its column: a new "
            "row counts as done, so that no run handles it."
        )
        yield warning("W009", processor, words, "Let the model have default=False.")
    if is_frozen(value):
        words = (
            f"{option} writes {value} into {field.name}: the time was read from the clock at "
            "import, so every row gets the same time."
        )
        hint = "Give the function itself, such as timezone.now, or the database's Now()."
        yield warning("W002", processor, words, hint)


def _problem(field: Field[Any, Any], value: Any) -> str:
    """Return why a column cannot hold the value, or an empty string if it can."""
    if isinstance(value, Model):
        return ""  # for a foreign key, which update() takes as well
    if value is None:
        return "" if field.null else "the column is NOT NULL"
    target: Any = field
    while target.remote_field:
        target = target.target_field
    try:
        with warnings.catch_warnings(action="ignore"):  # the flip will emit them
            text = str(target.to_python(value))
    except ValidationError as refused:
        return " ".join(refused.messages)
    except (TypeError, ValueError) as refused:
        return str(refused)
    # The limits of these are for forms alone.
    most = None if isinstance(target, TextField | BinaryField) else target.max_length
    if most is not None and len(text) > most:
        return f"it has {len(text)} characters, and the column holds {most}"
    return ""


# --- columns that each of two processors of one model needs for itself


def check_shared(one: User, other: User) -> Iterator[CheckMessage]:
    """Yield what two processors share, and each needs for itself; no conditions are solved.

    The stages of a pipeline may share columns, which a success clears: the ``pending`` of both
    names a column to which their ``done`` write different constants. A claimed row is recognised by
    the values of ``claim`` alone, so these must differ in any case.
    """
    name, label = other[0].name, other[1].model._meta.label
    claims = [_constants(asked, each.claim or {}).items() for each, asked in (one, other)]
    is_claim_shared = all(claims) and (claims[0] <= claims[1] or claims[1] <= claims[0])
    shared = [f"claim={dict(other[0].claim or {})!r}"] * is_claim_shared
    flags, theirs = _flags(*one), _flags(*other)
    in_both = flags.keys() & theirs.keys()
    if all(flags[column] == theirs[column] for column in in_both):
        kept = {_column(one[1], each) for each in _kept(one[0])} - {None}
        shared += [each for each in _kept(other[0]) if _column(other[1], each) in kept]
        for flag in in_both:
            words = (
                f"expected {name} and {one[0].name} to handle different rows, got two processors "
                f"that take rows out of pending by {flag[-1]} of {label}: a row is handled by one "
                "of them alone."
            )
            hint = "Let each have a column of its own, or tell their rows apart in pending."
            yield warning("W011", name, words, hint)
    if shared:
        words = (
            f"expected {name} to write to columns of its own, got {' and '.join(shared)} of {label}"
            f" shared with {one[0].name}: each processor would read the other's values as its own."
        )
        hint = (
            "Name other columns in Retry(…), Lease(…, field=…) and claimed_at=…, or claim another "
            "value. If no row is ever pending for both, silence dcl_processor.E010."
        )
        yield error("E010", name, words, hint)


def _kept(processor: BatchProcessor[Any]) -> list[str]:
    """Return the columns that keep when a row may be tried, and which worker has it."""
    last_error = processor.retry.last_error if processor.retry else None
    return [name for name in own_columns(processor) if name != last_error]


def _flags(processor: BatchProcessor[Any], question: Question[Any]) -> dict[Column, str]:
    """Return the columns that pending names and done writes, with the constants."""
    where = question.unfiltered.query.where
    tested = {each.target.column for each in parts(where) if isinstance(each, Col)}
    flags = _constants(question, processor.done or {})
    return {column: value for column, value in flags.items() if column[-1] in tested}


def _constants(question: Question[Any], values: Mapping[str, Any]) -> dict[Column, str]:
    columns = {_column(question, name): repr(v) for name, v in constants_of(values).items()}
    return {column: value for column, value in columns.items() if column is not None}


def _column(question: Question[Any], name: str) -> Column | None:
    try:
        field: Any = question.model._meta.get_field(name)
    except FieldDoesNotExist:
        return None  # which another check reports
    return (question.using, field.model._meta.db_table, field.column)
