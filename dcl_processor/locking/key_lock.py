"""Stage 2 for groups: lock the key, ask which of its rows may be claimed, then claim them.

The lock of a key is an advisory lock of the transaction, taken by a statement of its own, and never
waited for. Everything about the other rows of the key is asked by later statements, because the
snapshot of the locking statement is older than the lock. TRANSACTIONAL holds the lock until the row
is settled. In the other deliveries it ends with the claim, and then the mark in the row shows that
the key has a row in flight.

The lock's number is a hash of the key. Two keys with the same number wait for each other, and
nothing else, because rows are found by the key itself.
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
from dcl_processor.clock import DatabaseNow
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.exceptions import Unsupported
from dcl_processor.values import resolve

from .claiming import Claimed, Miss, claim, lock_database, lock_free
from .row_transactions import RowTransactions
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
    if claimed.rows and missed and key.groups.lease is not None and _reap(question, key, missed):
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
    places = 1 if key.groups.in_flight is not None else key.groups.most or 1
    numbers = [lock_number(key, place) for place in range(places)]
    with connection.cursor() as cursor:
        # In the condition of a scan over these numbers alone, of which it locks the first free one.
        cursor.execute(
            "SELECT number FROM unnest(%s::bigint[]) AS number"
            " WHERE pg_try_advisory_xact_lock(number) LIMIT 1",
            [numbers],
        )
        return cursor.fetchone() is not None


def lock_number(key: Key, place: int = 0) -> int:
    """Return the number of a key's lock, which is the same in all processes.

    By the names of table and column, and not of the processor, which may be renamed while workers
    of the older version run.
    """
    groups = key.groups
    spelled = str(groups.target.get_prep_value(key.value))
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
    # A row that is locked may be in the middle of a renewal, and counts as in flight.
    free = lock_free(question, pks)
    if free:
        _lapsed(question, key).filter(these(free)).update(**resolve(key.groups.unmarked))
    return _marked(question, key).filter(these(pks)).count()


def _lapsed(question: Question[Any], key: Key) -> QuerySet[Any]:
    assert key.groups.lease is not None
    return _marked(question, key).filter(**{f"{key.groups.lease.field}__lte": DatabaseNow()})


def _marked(question: Question[Any], key: Key) -> QuerySet[Any]:
    return question.table.filter(key.groups.in_flight, **{key.groups.column: key.value})


def refuse_database(question: Question[Any], label: str) -> None:
    """Raise ``Unsupported`` unless the database can lock a key; sends nothing."""
    connection = connections[question.using]
    # Without row locks, the one lock of the database is that of every key.
    if connection.vendor != "postgresql" and connection.features.has_select_for_update:
        raise Unsupported(
            f"{label}: expected PostgreSQL or SQLite for group_by, whose keys are locked for one "
            f"transaction, got {connection.display_name} on {question.using!r}; leave group_by "
            "out and run one worker, or use PostgreSQL."
        )


def refuse_collation(question: Question[Any], groups: Groups, label: str) -> None:
    """Raise ``Unsupported`` if equal keys may have several spellings; one query for a text."""
    connection = connections[question.using]
    is_text = isinstance(groups.target, CharField | TextField)
    if connection.vendor != "postgresql" or not is_text:
        return
    field = groups.field
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(field.model._meta.db_table)
        cursor.execute(_COLLATION, [table, field.column])
        found = cursor.fetchone()
    if found is not None and (found[0] not in _TEXTS or not found[1]):
        raise Unsupported(
            f"{label}: expected group_by={groups.column!r} to be a text whose equal values have "
            f"one spelling, got a column of type {found[0]}"
            f"{'' if found[1] else ' with a nondeterministic collation'}; name another column, or "
            "change its type or its collation."
        )
