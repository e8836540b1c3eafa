"""The lock of a key, for code that inserts rows of it, or changes them, in its own transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.question import Question, ask
from dcl_processor.definition.groups import Groups, Key, groups_of
from dcl_processor.exceptions import InvalidOption, OutsideTransaction

from .key_lock import lock_numbers, refuse_database
from .parts import lock_database
from .related_lock import lock_related

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


def lock_key(processor: Definition[Any], key: Any, using: str | None) -> None:
    """Wait for the lock of a key that workers take, and hold it until the transaction ends."""
    if processor.group_by is None:
        raise InvalidOption(
            f"{processor.name}: expected group_by=… for lock_key(), got a processor without it; "
            "name the column of the key in group_by."
        )
    question = ask(processor.pending, label=processor.name, using=using or processor.using)
    refuse_database(question, processor.name, related=processor.lock_related)
    groups = groups_of(processor, question.model)
    if connections[question.using].get_autocommit():
        raise OutsideTransaction(
            f"{processor.name}: expected lock_key() inside transaction.atomic() on "
            f"{question.using!r}, at whose end the lock is released, got no transaction; put the "
            "call and the writes that it is for into one block."
        )
    value = _value(groups, key, processor.name)
    if value is not None and not _wait(question, Key(groups, value)):
        raise InvalidOption(
            f"{processor.name}: expected lock_key() to take the key of a row of "
            f"{groups.field.related_model._meta.label}, whose lock is that of the key, got "
            f"{key!r}, which no row has; insert that row first."
        )


def _value(groups: Groups, key: Any, label: str) -> Any:
    """Return the value of the key's column; ``None``: rows with it are in no group."""
    column = f"{groups.model._meta.label}.{groups.column}"
    value = key
    if isinstance(key, Model):
        field = groups.field
        if field.remote_field is None or not isinstance(key, field.related_model):
            raise InvalidOption(
                f"{label}: expected lock_key() to take {_words(groups)}, got {key!r}."
            )
        value = getattr(key, field.target_field.attname)
        if value is None:
            raise InvalidOption(
                f"{label}: expected lock_key() to take a saved row, got {key!r}, which has no key "
                "yet; save it first."
            )
    try:
        # Spelled as a worker spells it, which reads the value from the database.
        return None if value is None else groups.target.to_python(value)
    except ValidationError as error:
        raise InvalidOption(
            f"{label}: expected lock_key() to take {_words(groups)}, got {key!r}, which "
            f"{column} cannot have."
        ) from error


def _words(groups: Groups) -> str:
    related = groups.field.related_model
    or_row = f", or a row of {related._meta.label}" if related is not None else ""
    return f"a value of {groups.model._meta.label}.{groups.column}{or_row}"


def _wait(question: Question[Any], key: Key) -> bool:
    """Wait for the lock of a key; return whether there is anything that can be locked."""
    connection = connections[question.using]
    if not connection.features.has_select_for_update:
        lock_database(question)  # its one lock is that of every key
        return True
    if key.groups.lock_related:
        return lock_related(question, key, wait=True)
    # Race: overtaking. A row that is inserted under the lock is committed before the next worker
    # asks for the head of the key.
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(number) FROM unnest(%s::bigint[]) AS number",
            [lock_numbers(key)],
        )
    return True
