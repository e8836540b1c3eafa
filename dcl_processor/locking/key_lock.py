"""Stage 2 for groups: lock the key, ask which of its rows may be claimed, then claim them.

The lock of a key is an advisory lock of the transaction, taken by a statement of its own, and never
waited for. Everything about the other rows of the key is asked by later statements, because the
snapshot of the locking statement is older than the lock. TRANSACTIONAL holds the lock until the row
is settled. In the other deliveries it ends with the claim, and then the mark in the row shows that
the key has a row in flight.

With ``lock_related`` the lock is the row lock of the related row instead. Otherwise its number is a
hash of the key. Two keys with the same number share one lock, so each is busy while the other
is locked. No wrong row is claimed, because a claim finds rows by the key itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from django.db import connections
from django.db.models import CharField, Model, QuerySet, TextField

from dcl_processor.candidates.groups import head
from dcl_processor.candidates.question import Question, these
from dcl_processor.candidates.scan import retrying
from dcl_processor.clock import DatabaseNow
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.exceptions import Unsupported
from dcl_processor.values import resolve

from .claiming import Claimed, Miss, claim, lock_database, lock_free
from .related_lock import lock_related
from .row_transactions import RowTransactions
from .waiting import written_parts
from .wanted import Wanted

M = TypeVar("M", bound=Model)

#: Types whose equal values have one spelling, by PostgreSQL's names.
_TEXTS = ("text", "varchar")

_COLLATION = """
    SELECT pg_type.typname, coalesce(pg_collation.collisdeterministic, true)
    FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
    LEFT JOIN pg_collation ON pg_collation.oid = attcollation
    WHERE attrelid = %s::regclass AND attname = %s
"""


def claim_in_turn(
    question: Question[M], wanted: Wanted, transactions: RowTransactions | None = None
) -> Claimed[M]:
    """Claim the wanted rows of one key as far as it is their turn, as ``claim()`` does.

    Runs inside the transaction that the rows are handled or marked in, and outside any savepoint,
    whose rollback would release the key.
    """
    key = wanted.key
    assert key is not None
    # Race: two of one key. The lock is a statement of its own. What follows sees all rows that were
    # claimed, or settled, by the transactions that had the key before.
    if not _lock(question, key):
        return Claimed({}, dict.fromkeys(wanted.pks, Miss.KEY_LOCKED))
    turn = _turn(question, key, wanted.pks)
    if isinstance(turn, Miss):
        return Claimed({}, dict.fromkeys(wanted.pks, turn))
    claimed = _of_key(question, key, claim(question, Wanted(turn), transactions))
    missed = [pk for pk in turn if pk not in claimed.rows]
    # Race: two of one key. A wanted row whose lease has lapsed is missed if its worker renews it.
    if claimed.rows and missed and key.groups.lease is not None:
        _reap(question, key, missed)
        others = _marked(question, key).exclude(these(claimed.rows)).count()
        if others + len(claimed.rows) > (key.groups.most or len(claimed.rows)):
            return Claimed({}, dict.fromkeys(wanted.pks, Miss.KEY_IN_USE))
    return claimed


def _turn(question: Question[Any], key: Key, pks: Sequence[Any]) -> Sequence[Any] | Miss:
    """Return which of the rows may be claimed now that the key is locked, or why none may."""
    groups = key.groups
    if groups.in_flight is not None:
        pks = pks[: groups.most]
        in_flight = _in_flight(question, key, pks)
        if in_flight >= (groups.most or 1):
            return Miss.KEY_IN_USE
        if in_flight and groups.most is not None:
            pks = pks[: groups.most - in_flight]
            # Race: two of one key. The wanted rows are fewer now, and a lapsed one of the others
            # is not to be claimed any more.
            if _in_flight(question, key, pks) > in_flight:
                return Miss.KEY_IN_USE
    # Race: overtaking. The head is asked for without a lock, and is then locked by its primary key.
    # SKIP LOCKED in one statement would pass a head that another session has locked.
    if groups.in_order and head(question, key) != pks[0]:
        return Miss.NOT_FIRST
    return pks


def _of_key(question: Question[Any], key: Key, claimed: Claimed[M]) -> Claimed[M]:
    """Leave out the claimed rows that were moved to another key before they were locked."""
    # Race: two of one key. A row that was moved since its candidates were read belongs to a key
    # that is not locked.
    column, rows = key.groups.column, claimed.rows
    if all(column in vars(row) for row in rows.values()):
        now = {pk: getattr(row, column) for pk, row in rows.items()}
    else:
        # Deferred by the user's queryset: one query for all rows, instead of one per instance.
        now = dict(question.table.filter(these(rows)).values_list("pk", column))
    moved = [pk for pk in rows if now.get(pk) != key.value]
    if not moved:
        return claimed
    return replace(
        claimed,
        rows={pk: row for pk, row in rows.items() if pk not in moved},
        misses={**claimed.misses, **dict.fromkeys(moved, Miss.STALE)},
    )


def _lock(question: Question[Any], key: Key) -> bool:
    """Lock the key until the end of the transaction; return whether it was free.

    With several rows in flight in one transaction each, the key has as many locks.
    """
    connection = connections[question.using]
    if not connection.features.has_select_for_update:
        lock_database(question)  # its one lock is that of every key
        return True
    if key.groups.lock_related:
        return lock_related(question, key, wait=False)
    with connection.cursor() as cursor:
        # In the condition of a scan over these numbers alone, of which it locks the first free one.
        cursor.execute(
            "SELECT number FROM unnest(%s::bigint[]) AS number"
            " WHERE pg_try_advisory_xact_lock(number) LIMIT 1",
            [lock_numbers(key)],
        )
        return cursor.fetchone() is not None


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


def _in_flight(question: Question[Any], key: Key, pks: Sequence[Any]) -> int:
    """Return how many rows of the locked key are claimed and not settled.

    The lapsed ones among ``pks`` are not counted, because they are about to be claimed.
    """
    rows = _marked(question, key)
    if key.groups.lease is None:
        return rows.count()
    marked = {pk: pk for pk in rows.values_list("pk", flat=True)}
    if not marked:
        return 0
    late = set(_lapsed(question, key).filter(these(marked)).values_list("pk", flat=True))
    return len(marked.keys() - late) + _reap(question, key, [pk for pk in late if pk not in pks])


def _reap(question: Question[Any], key: Key, pks: Sequence[Any]) -> int:
    """Take lapsed leases away from these rows of a locked key; return how many keep theirs."""
    if not pks:
        return 0
    # Race: two of one key. The worker of a lapsed lease may be alive and renew it, because it
    # recognises its row by the lease alone. So the lease is taken away before a sibling is claimed.
    # A row that is locked may be in the middle of a renewal, and counts as in flight; so is one
    # whose part in a parent's table is locked, where the lease may be.
    free = lock_free(question, pks, written_parts(question.model, key.groups.unmarked))
    if free:
        lapsed = _lapsed(question, key).filter(these(free))
        # Only a row that is still pending has the mark of this processor. A person may have taken
        # it out of pending, or another processor, which shares the lease's column, may have it.
        if marked := [*question.still_pending(free).values_list("pk", flat=True)]:
            lapsed.filter(these(marked)).update(**resolve(key.groups.unmarked))
        assert key.groups.lease is not None
        lapsed.update(**{key.groups.lease.field: key.groups.lease.taken_away})
    return _marked(question, key).filter(these(pks)).count()


def _lapsed(question: Question[Any], key: Key) -> QuerySet[Any]:
    assert key.groups.lease is not None
    return _marked(question, key).filter(**{f"{key.groups.lease.field}__lte": DatabaseNow()})


def _marked(question: Question[Any], key: Key) -> QuerySet[Any]:
    return question.table.filter(key.groups.in_flight, **{key.groups.column: key.value})


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
