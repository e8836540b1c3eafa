"""Checks of what is written to rows: ``done``, ``failed``, ``reset``, ``claim``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import CharField, Field, Model, Value
from django.db.models.expressions import Col

from dcl_processor.exceptions import InvalidDone
from dcl_processor.options.model_columns import check_columns, check_own_columns, written
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.values import constants_of, is_constant

from .questions import is_frozen, parts, refusals


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for option, values in written(processor):
        try:
            check_columns(values, model, processor.name, option)
        except InvalidDone as error:
            sentence = str(error).removeprefix(f"{processor.name}: ")
            hint = "A flip writes the model's own columns, by the names of their fields."
            yield checks.Error(sentence, hint=hint, obj=processor.name, id="dcl_processor.E002")
            continue
        constants = {
            columns[name]: value.value if isinstance(value, Value) else value
            for name, value in values.items()
            if isinstance(value, Value) or is_constant(value)
        }
        yield from _check_unique(processor.name, option, model, constants)
        for field, value in constants.items():
            yield from _check_constant(processor.name, option, field, value)
    hint = "Abstract models with these columns are in dcl_processor.columns."
    own = partial(check_own_columns, processor, model)
    yield from refusals(processor, own, hint, "dcl_processor.E009")


def _check_unique(
    processor: str, option: str, model: type[Model], constants: Mapping[Any, Any]
) -> Iterator[CheckMessage]:
    """Yield what would fail for the second row only after its handler was called."""
    meta = model._meta
    together = [*meta.unique_together, *(each.fields for each in meta.total_unique_constraints)]
    names = {field.name for field, value in constants.items() if value is not None}
    for columns in [*together, *([f.name] for f in meta.concrete_fields if f.unique)]:
        if names.issuperset(columns):
            yield checks.Error(
                f"{option} writes the same value into {' and '.join(columns)} of every row, where "
                "values must be unique: the second row would fail.",
                hint="Give a callable or an expression, or, in get_done(), the result.",
                obj=processor,
                id="dcl_processor.E003",
            )


def _check_constant(
    processor: str, option: str, field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if problem := _problem(field, value):
        yield checks.Error(
            f"expected {option} to give {field.name} a value that its column can hold, got "
            f"{value!r}: {problem}",
            hint=f"The column is a {type(field).__name__}.",
            obj=processor,
            id="dcl_processor.E004",
        )
    default = field.get_default() if field.has_default() else field.db_default
    # False, which clears a "dirty" flag, may be the default.
    if option == "done" and value is True and getattr(default, "value", default) is True:
        yield checks.Warning(
            f"done writes True into {field.name}, and True is the default of its column: a new "
            "row counts as done, so that no run handles it.",
            hint="default=True belongs into the migration that adds the flag to old rows; the "
            "model has default=False.",
            obj=processor,
            id="dcl_processor.W009",
        )
    if is_frozen(value):
        yield checks.Warning(
            f"{option} writes {value} into {field.name}: the time was read from the clock at "
            "import, so every row gets the same time.",
            hint="Give the function itself, such as timezone.now, or the database's Now().",
            obj=processor,
            id="dcl_processor.W002",
        )


def _problem(field: Field[Any, Any], value: Any) -> str:
    """Return why a column cannot hold the value, or an empty string if it can."""
    if isinstance(value, Model):
        return ""  # for a foreign key, which update() takes as well
    if value is None:
        return "" if field.null else "the column is NOT NULL"
    try:
        with warnings.catch_warnings(action="ignore"):  # the flip will emit them
            text = str(field.to_python(value))
    except ValidationError as error:
        return " ".join(error.messages)
    except (TypeError, ValueError) as error:
        return str(error)
    most = field.max_length if isinstance(field, CharField) else None
    if most is not None and len(text) > most:
        return f"it has {len(text)} characters, and the column holds {most}"
    return ""


# --- columns that each of two processors of one model needs for itself
#
# If two processors count attempts in one column, they use up each other's attempts, and a processor
# that never ran finds its rows postponed. The stages of a pipeline may share these columns: a
# success clears them for the next stage. Two processors are taken for stages if the ``pending`` of
# both names a column to which their ``done`` write different constants; conditions are not solved.
# A claimed row is recognised by the values of ``claim`` alone, so these must differ in any case.


User = tuple[BatchProcessor[Any], Question[Any]]

#: A column, by its database, its table and its name: children share their parents' columns.
Column = tuple[str, str, str]


def check_shared(users: Sequence[User]) -> Iterator[CheckMessage]:
    """Yield an error for every two processors that share what each needs for itself."""
    for one, other in combinations(users, 2):
        shared = [*_shared_claim(one, other)]
        flags, theirs = _flags(*one), _flags(*other)
        in_both = flags.keys() & theirs.keys()
        if not any(flags[column] != theirs[column] for column in in_both):  # stages
            kept = _kept(*one)
            shared += [name for column, name in _kept(*other).items() if column in kept]
            for flag in in_both:
                yield checks.Warning(
                    f"expected {other[0].name} and {one[0].name} to handle different rows, got two "
                    f"processors that take rows out of pending by {flag[-1]} of "
                    f"{other[1].model._meta.label}: a row is handled by one of them alone.",
                    hint="Let each test and write a column of its own, or add a condition to "
                    "pending that tells their rows apart.",
                    obj=other[0].name,
                    id="dcl_processor.W011",
                )
        if shared:
            names = " and ".join(shared)
            yield checks.Error(
                f"expected {other[0].name} to write to columns of its own, got {names} of "
                f"{other[1].model._meta.label} shared with {one[0].name}: each processor would "
                "read the other's values as its own.",
                hint="Name other columns, such as Retry(attempts='…', next_attempt_at='…'), "
                "Lease(…, field='…') and claimed_at='…', or claim another value. If no row is "
                "ever pending for both, silence dcl_processor.E010.",
                obj=other[0].name,
                id="dcl_processor.E010",
            )


def _flags(processor: BatchProcessor[Any], question: Question[Any]) -> dict[Column, str]:
    """Return the columns that pending names and done writes, with the constants."""
    query = question.unfiltered.query
    tested = {each.target.column for each in parts(query.where) if isinstance(each, Col)}
    flags = {
        _column(question, name): repr(value)
        for name, value in constants_of(processor.done or {}).items()
    }
    return {column: value for column, value in flags.items() if column and column[-1] in tested}


def _kept(processor: BatchProcessor[Any], question: Question[Any]) -> Mapping[Column, str]:
    """Return the columns that keep when a row may be tried, and which worker has it."""
    retry, lease = processor.retry, processor.lease
    names = [
        *(filter(None, (retry.attempts, retry.next_attempt_at)) if retry else ()),
        *((lease.field,) if lease else ()),
        *((processor.claimed_at,) if processor.claimed_at else ()),
    ]
    columns = {name: _column(question, name) for name in names}
    return {column: name for name, column in columns.items() if column is not None}


def _shared_claim(one: User, other: User) -> Iterator[str]:
    """Yield the claim by which a row of one processor is taken for a row of the other."""
    claims = [_claim(*one), _claim(*other)]
    if all(claims) and (claims[0] <= claims[1] or claims[1] <= claims[0]):
        yield f"claim={dict(other[0].claim or {})!r}"


def _claim(
    processor: BatchProcessor[Any], question: Question[Any]
) -> set[tuple[Column | None, str]]:
    """Return the constants by which a claimed row is recognised."""
    return {
        (_column(question, name), repr(value))
        for name, value in constants_of(processor.claim or {}).items()
    }


def _column(question: Question[Any], name: str) -> Column | None:
    try:
        field: Any = question.model._meta.get_field(name)
    except FieldDoesNotExist:
        return None  # which another check reports
    return (question.using, field.model._meta.db_table, field.column)
