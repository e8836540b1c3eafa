"""What a processor's options require of the model: columns that exist and have the right kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import CharField, DateTimeField, Field, IntegerField, Model, TextField

from dcl_processor.options.options import Definition
from dcl_processor.report.exceptions import InvalidDone, InvalidOption
from dcl_processor.report.values import Values

#: The options whose values are written to a row.
FLIPS = ("done", "failed", "reset", "claim")


def written(processor: Definition[Any]) -> Iterator[tuple[str, Values]]:
    """Yield each option whose values are written to a row, and these values."""
    for option in FLIPS:
        yield option, getattr(processor, option) or {}


def own_columns(processor: Definition[Any]) -> list[str]:
    """Return the names of the columns of the processor's own bookkeeping."""
    noted = processor.retry.columns if processor.retry else ()
    own = (processor.lease.field if processor.lease else None, processor.claimed_at)
    return [*noted, *filter(None, own)]


def written_columns(processor: Definition[Any], model: type[Model]) -> list[str]:
    """Return the fields of the model that claims and settlements write, as far as that is known.

    The columns of a function are not. A name that is no column is reported by a check of its own.
    """
    named = [*(name for _, some in written(processor) for name in some), *own_columns(processor)]
    fields = {name: f.name for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    return list(dict.fromkeys(fields[name] for name in named if name in fields))


def check(processor: Definition[Any], model: type[Model]) -> None:
    """Raise unless the model has the columns that the processor would write."""
    for option, values in written(processor):
        check_columns(values, model, processor.name, option)
    check_own_columns(processor, model)


def check_own_columns(processor: Definition[Any], model: type[Model]) -> None:
    """Raise unless the model has the columns of the processor's own bookkeeping."""
    if processor.retry is not None:
        _check_retry(processor, model)
    times = {"claimed_at": processor.claimed_at}
    times["the Lease's field"] = processor.lease.field if processor.lease else None
    for option, name in times.items():
        if name is not None:
            named = f"{processor.name}: expected {option}={name!r}"
            words = "a nullable DateTimeField"
            expect_column(model, name, DateTimeField, null=True, named=named, words=words)
    since = processor.pending_since
    columns: dict[Any, Any] = {each.name: each for each in model._meta.concrete_fields}
    column = columns.get(since)
    if isinstance(since, str) and not isinstance(column, DateTimeField):
        raise InvalidOption(
            f"{processor.name}: expected pending_since={since!r} to name a DateTimeField of "
            f"{model._meta.label}, got {_kind_of(column)}; name the column with the time since "
            "when a row is pending, or give an expression, such as F('order__shipped_at')."
        )


def _check_retry(processor: Definition[Any], model: type[Model]) -> None:
    for option, kind, null, words in (
        ("attempts", IntegerField, None, "an integer column"),
        ("next_attempt_at", DateTimeField, True, "a nullable date and time column"),
        ("last_error", (CharField, TextField), None, "a text column"),
    ):
        name = getattr(processor.retry, option)
        if isinstance(name, str):
            named = f"{processor.name}: expected Retry's {option}={name!r}"
            expect_column(model, name, kind, null=null, named=named, words=words)


def check_columns(values: Values, model: type[Model], label: str, option: str = "done") -> None:
    """Raise ``InvalidDone`` unless every name is a column of the model that a flip may write."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for name in values:
        if name not in columns:
            raise InvalidDone(
                f"{label}: expected {option} to name columns of {model._meta.label}, got {name!r}; "
                f"the columns are {', '.join(f.name for f in model._meta.concrete_fields)}."
            )
        is_key = columns[name] in model._meta.pk_fields
        if is_key or columns[name].generated:
            raise InvalidDone(
                f"{label}: expected {option} to name columns that a flip may write, got {name!r}, "
                f"which is {'the primary key' if is_key else 'generated'}."
            )
        if sentence := in_parents_table(model, columns[name]):
            raise InvalidDone(f"{label}: expected {option} to name columns {sentence}")


def in_parents_table(model: type[Model], column: Any) -> str | None:
    """Return the end of a sentence that refuses a column of a parent, of another table."""
    parent = column.model._meta.concrete_model
    if parent is model._meta.concrete_model:
        return None
    return (
        f"in the table of {model._meta.label} itself, got {column.name!r}, which is in that of "
        f"{parent._meta.label}; write the processor over {parent._meta.label}."
    )


def by_attname(model: type[Model], values: Values) -> dict[str, Any]:
    """Return the values by the ``attname`` of their columns: a foreign key has two names."""
    meta: Any = model._meta
    return {meta.get_field(name).attname: value for name, value in values.items()}


def expect_column(
    model: type[Model],
    name: str,
    kind: type[Field[Any, Any]] | tuple[type[Field[Any, Any]], ...],
    *,
    null: bool | None = None,
    named: str,
    words: str,
) -> None:
    """Raise ``InvalidOption`` unless the model has such a column; ``null``: whether it may be NULL.

    ``named`` and ``words`` are the beginning and the middle of the sentence.
    """
    column = {field.name: field for field in model._meta.concrete_fields}.get(name)
    fits = isinstance(column, kind) and not column.primary_key and not column.generated
    if fits and null in (None, column.null):  # type: ignore[union-attr]  # it fits: it is one
        if sentence := in_parents_table(model, column):
            raise InvalidOption(f"{named} to name a column {sentence}")
        return
    raise InvalidOption(
        f"{named} to name {words} of {model._meta.label}, got {_kind_of(column)}; add the column, "
        "or name another."
    )


def _kind_of(column: Any) -> str:
    if column is None:
        return "no such column"
    kind = "the primary key" if column.primary_key else f"a {type(column).__name__}"
    return f"{kind} that {'may' if column.null else 'cannot'} be NULL"
