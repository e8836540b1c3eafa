"""The locks of keys: their numbers, and who takes them where."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import CharField, Model, TextField

from dcl_processor.candidates.question import Question, ask
from dcl_processor.candidates.scan import retrying
from dcl_processor.definition.groups import Groups, Key, groups_of
from dcl_processor.exceptions import InvalidOption, OutsideTransaction, Unsupported

from .row_locks import lock_database

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: Types whose equal values have one spelling, by PostgreSQL's names.
_TEXTS = ("text", "varchar")

_COLLATION = """
    SELECT pg_type.typname, coalesce(pg_collation.collisdeterministic, true)
    FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
    LEFT JOIN pg_collation ON pg_collation.oid = attcollation
    WHERE attrelid = %s::regclass AND attname = %s
"""


def lock_numbers(key: Key) -> list[int]:
    """Return the numbers of a key's locks, of which a worker takes one."""
    places = 1 if key.groups.in_flight is not None else key.groups.most or 1
    return [lock_number(key, place) for place in range(places)]


def lock_number(key: Key, place: int = 0) -> int:
    """Return the number of a key's lock, which is the same in all processes.

    By the names of table and column, and not of the processor, which may be renamed while workers
    of the older version run. The schema is not among them: it would be one more query for each
    transaction, because ``search_path`` may change.
    """
    groups = key.groups
    value = groups.target.get_prep_value(key.value)
    # Of a member of an enumeration that is a string, str() is the member's name.
    spelled = str.__str__(value) if isinstance(value, str) else str(value)
    words = ("dcl_processor", groups.model._meta.db_table, groups.column, str(place), spelled)
    digest = blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def refuse_database(question: Question[Any], label: str) -> None:
    """Raise ``Unsupported`` unless the database can lock a key; sends nothing."""
    connection = connections[question.using]
    # Without row locks, the one lock of the database is that of every key.
    has_lock = connection.vendor == "postgresql" or not connection.features.has_select_for_update
    if not has_lock:
        raise Unsupported(
            f"{label}: expected PostgreSQL or SQLite for group_by, whose keys are locked for one "
            f"transaction, got {connection.display_name} on {question.using!r}; leave "
            "group_by out and run one worker, or use PostgreSQL."
        )


def _collation(connection: Any, field: Any) -> Any:
    """Return the type of the column, and whether equal values of it have one spelling."""
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(field.model._meta.db_table)
        cursor.execute(_COLLATION, [table, field.column])
        return cursor.fetchone()


def refuse_collation(question: Question[Any], groups: Groups, label: str) -> None:
    """Raise ``Unsupported`` if equal keys may have several spellings; one query for a text."""
    connection = connections[question.using]
    is_text = isinstance(groups.target, CharField | TextField)
    if connection.vendor != "postgresql" or not is_text:
        return
    # Read as the candidates are, because a session that ends here has lost no row.
    found = retrying(lambda: _collation(connection, groups.field), question.using)
    if found is not None and (found[0] not in _TEXTS or not found[1]):
        raise Unsupported(
            f"{label}: expected group_by={groups.column!r} to be a text whose equal values have "
            f"one spelling, got a column of type {found[0]}"
            f"{'' if found[1] else ' with a nondeterministic collation'}; name another column, or "
            "change its type or its collation."
        )


# --- for code that inserts rows of a key, or changes them, in its own transaction


def lock_key(processor: Definition[Any], key: Any, using: str | None) -> None:
    """Wait for the lock of a key that workers take, and hold it until the transaction ends."""
    if processor.group_by is None:
        raise InvalidOption(
            f"{processor.name}: expected group_by=… for lock_key(), got a processor without it; "
            "name the column of the key in group_by."
        )
    question = ask(processor.pending, label=processor.name, using=using or processor.using)
    refuse_database(question, processor.name)
    groups = groups_of(processor, question.model)
    if connections[question.using].get_autocommit():
        raise OutsideTransaction(
            f"{processor.name}: expected lock_key() inside transaction.atomic() on "
            f"{question.using!r}, at whose end the lock is released, got no transaction; put the "
            "call and the writes that it is for into one block."
        )
    value = _value(groups, key, processor.name)
    if value is not None:
        _wait(question, Key(groups, value))


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


def _wait(question: Question[Any], key: Key) -> None:
    """Wait for the lock of a key."""
    connection = connections[question.using]
    if not connection.features.has_select_for_update:
        lock_database(question)  # its one lock is that of every key
        return
    # Race: overtaking. A row that is inserted under the lock is committed before the next worker
    # asks for the head of the key.
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(number) FROM unnest(%s::bigint[]) AS number",
            [lock_numbers(key)],
        )
