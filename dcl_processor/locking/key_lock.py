"""The locks of keys: their numbers, and where they cannot be had."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from django.db import connections
from django.db.models import CharField, TextField

from dcl_processor.candidates.question import Question
from dcl_processor.candidates.scan import retrying
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.exceptions import Unsupported

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


def refuse_database(question: Question[Any], label: str, *, related: bool) -> None:
    """Raise ``Unsupported`` unless the database can lock a key; sends nothing.

    ``related``: a key is locked by its related row.
    """
    connection = connections[question.using]
    # Without row locks, the one lock of the database is that of every key.
    has_lock = connection.vendor == "postgresql" or not connection.features.has_select_for_update
    if not has_lock and not related:
        raise Unsupported(
            f"{label}: expected PostgreSQL or SQLite for group_by, whose keys are locked for one "
            f"transaction, got {connection.display_name} on {question.using!r}; set lock_related "
            "if the key is a foreign key and the claims are short, leave group_by out and run one "
            "worker, or use PostgreSQL."
        )


def refuse_without_skip_locked(using: str, label: str) -> None:
    """Raise ``Unsupported`` unless a claim can pass a related row that is locked; may connect."""
    connection = connections[using]
    features = connection.features
    if features.has_select_for_update and not features.has_select_for_update_skip_locked:
        raise Unsupported(
            f"{label}: expected a server with SKIP LOCKED for lock_related, got "
            f"{connection.display_name} without it on {using!r}; use MariaDB from 10.6, MySQL from "
            "8.0.1 or PostgreSQL, or leave group_by out and run one worker."
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
    if is_text and connection.vendor == "mysql":
        raise Unsupported(
            f"{label}: expected group_by={groups.column!r} to be a key of whole numbers, UUIDs, "
            f"dates or booleans on {connection.display_name}, got a text, whose equal values may "
            "have several spellings there; name another column."
        )
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
