"""Lock keys, ask which of their rows may be claimed, then claim these.

The lock of a key is an advisory lock of the transaction, taken by a statement of its own, and never
waited for. Everything about the other rows of the key is asked by later statements, because the
snapshot of the locking statement is older than the lock. TRANSACTIONAL holds the lock until the row
is settled. In the other deliveries it ends with the claim, and then the mark in the row shows that
the key has a row in flight.

The lock's number is a hash of the key. Two keys with the same number share one lock, so each is
busy while the other is locked. No wrong row is claimed, because a claim finds rows by the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from dcl_processor.candidates.groups import first_of
from dcl_processor.candidates.question import Question, RowFilter, these
from dcl_processor.clock import DatabaseNow
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.locking.key_lock import lock_numbers
from dcl_processor.locking.row_locks import database_lock, lock_free
from dcl_processor.values import resolve

from .claim import Read, claim, read_of
from .session import Session
from .settlement import Claimed, Held, Missed, Statement, Wanted, column

#: Claims wanted rows in the transaction that has their keys locked.
ClaimRows = Callable[[Session, Question[Any], Wanted], Claimed]


@dataclass(slots=True)
class _Look:
    """What the statements after the locks have found about the keys' rows.

    ``marked``: those in flight, by key, those in doubt and those whose lease has lapsed included;
    ``late``: the latter; ``heads``: the first unfinished row of each key.
    """

    marked: dict[Any, set[Any]] = field(default_factory=dict)
    late: set[Any] = field(default_factory=set)
    heads: set[Any] = field(default_factory=set)


def _claim_locked(session: Session, question: Question[Any], wanted: Wanted) -> Claimed:
    return claim(session, question, wanted, session.execute_all)


def claim_in_turn(
    session: Session, question: Question[Any], wanted: Wanted, claim_rows: ClaimRows = _claim_locked
) -> Claimed:
    """Claim the wanted rows as far as it is their keys' turn, as ``claim()`` does.

    What ``claim_rows`` has written to a row that is not in the result is to be undone.
    """
    pks, missed = take_turn(session, question, wanted)
    if not pks:
        return Claimed([], missed, driver=session.connection.connection)
    claimed = claim_rows(session, question, Wanted(pks))
    moved = moved_rows(question, wanted, claimed.rows)
    ours = [held.pk for held in claimed.rows if held.pk not in moved]
    late = late_keys(question, wanted, pks, ours)
    in_use = [pk for pk in pks if wanted.keys[pk].value in late]
    claimed.missed = {
        **missed,
        **claimed.missed,
        **dict.fromkeys(moved, Missed.STALE),
        **dict.fromkeys(in_use, Missed.IN_USE),
    }
    claimed.rows = [held for held in claimed.rows if held.pk not in claimed.missed]
    return claimed


def take_turn(
    session: Session, question: Question[Any], wanted: Wanted
) -> tuple[list[Any], dict[Any, Missed]]:
    """Open a transaction, and lock the keys.

    Return which rows may be claimed now, and why the others of a key may not.
    Outside any savepoint, whose rollback would release the keys.
    """
    # Race: two of one key. The lock is a statement of its own. What follows sees all rows that were
    # claimed, or settled, by the transactions that had the key before.
    keys = {key.value: key for key in wanted.keys.values()}
    groups = next(iter(keys.values())).groups
    if not session.connection.features.has_select_for_update:
        # The one lock of the database is that of every key.
        session.begin([Statement(database_lock(question))])
        free, look = {*keys}, _look(session, question, groups, keys)
    else:
        free, look = _lock_and_look(session, question, groups, keys)
    free_rows, missed, by_key = list[Any](), dict[Any, Missed](), dict[Any, list[Any]]()
    for pk in wanted.pks:
        by_key.setdefault(wanted.keys[pk].value, []).append(pk)
    for value, pks in by_key.items():
        found = _turn_of(question, keys[value], pks, look) if value in free else Missed.LOCKED
        if isinstance(found, Missed):
            missed.update(dict.fromkeys(pks, found))
        else:
            free_rows += found
    return free_rows, missed


def _lock_and_look(
    session: Session, question: Question[Any], groups: Groups, keys: Mapping[Any, Key]
) -> tuple[set[Any], _Look]:
    """Return the keys that could be locked, and what was asked about all of them."""
    numbers = {value: lock_numbers(key) for value, key in keys.items()}
    asked = _statements(question, groups, keys)
    locking = _locking([each for some in numbers.values() for each in some], one=len(keys) == 1)
    [locks, *answers] = session.begin([locking, *[read.statement for read in asked]])
    locked = {number for [number] in locks}
    free = {value for value, theirs in numbers.items() if not locked.isdisjoint(theirs)}
    return free, _understood(question, groups, asked, answers)


def _locking(numbers: list[int], *, one: bool) -> Statement:
    """Return the statement that locks keys; ``one``: by the first of the numbers that is free."""
    # In the condition of a scan over these numbers alone.
    locking = (
        "SELECT number FROM unnest(%s::bigint[]) AS number WHERE pg_try_advisory_xact_lock(number)"
    )
    return Statement(f"{locking} LIMIT 1" if one else locking, [numbers])


def _look(
    session: Session, question: Question[Any], groups: Groups, values: Collection[Any]
) -> _Look:
    asked = _statements(question, groups, values)
    answers = session.execute_all([read.statement for read in asked])
    return _understood(question, groups, asked, answers)


def _statements(question: Question[Any], groups: Groups, values: Collection[Any]) -> Sequence[Read]:
    """Return what is asked about the rows of the keys, those in flight first."""
    column, asked = groups.column, list[Read]()
    if groups.in_flight is not None:

        def marked(rows: RowFilter) -> QuerySet[Any, Any]:
            return _marked(question, groups).filter(rows.condition).values_list("pk", column)

        asked.append(read_of(question, ("in flight", None), [*values], marked, column=column))
    if groups.in_order:
        # Race: overtaking. The head is asked for without a lock, and is then locked by its primary
        # key. SKIP LOCKED in one statement would pass a head that another session has locked.
        def head(rows: RowFilter) -> QuerySet[Any, Any]:
            return first_of(question, rows.condition)

        reads = [read_of(question, ("head", None), [each], head, column=column) for each in values]
        asked += [_as_one(reads)] if connections[question.using].vendor == "postgresql" else reads
    return asked


def _as_one(reads: Sequence[Read]) -> Read:
    """Return one statement that has the answers of all, which are limited one by one."""
    if len(reads) == 1:
        return reads[0]
    sql = " UNION ALL ".join([f"({read.statement.sql})" for read in reads])
    params = [each for read in reads for each in read.statement.params]
    return Read(Statement(sql, params), reads[0].build)


def _understood(
    question: Question[Any], groups: Groups, asked: Sequence[Read], answers: Sequence[Any]
) -> _Look:
    look = _Look()
    found = [read.build(answer) for read, answer in zip(asked, answers, strict=True)]
    if groups.in_flight is not None:
        marked, *found = found
        for pk, value in marked:
            look.marked.setdefault(value, set()).add(pk)
        if groups.lease is not None and marked:
            named = these([pk for pk, _ in marked])
            look.late.update(_lapsed(question, groups).filter(named).values_list("pk", flat=True))
    look.heads.update([pk for some in found for pk in some])
    return look


def _turn_of(
    question: Question[Any], key: Key, pks: Sequence[Any], look: _Look
) -> Sequence[Any] | Missed:
    """Return which rows of a locked key may be claimed now, or why none may."""
    groups = key.groups
    if groups.in_flight is not None:
        pks = pks[: groups.most]
        marked = look.marked.get(key.value, set())
        # Those that are about to be claimed are not counted.
        late = [pk for pk in marked & look.late if pk not in pks]
        in_flight = len(marked - look.late) + _reap(question, key, late)
        if in_flight >= (groups.most or 1):
            return Missed.IN_USE
        if in_flight and groups.most is not None:
            left, pks = pks[groups.most - in_flight :], pks[: groups.most - in_flight]
            # Race: two of one key. A lapsed row that is not to be claimed any more counts.
            if _reap(question, key, [pk for pk in left if pk in look.late]):
                return Missed.IN_USE
    # In order, no unfinished row of the key comes before the one to claim.
    return Missed.NOT_FIRST if groups.in_order and pks[0] not in look.heads else pks


def moved_rows(question: Question[Any], wanted: Wanted, rows: Sequence[Held]) -> Collection[Any]:
    """Return the claimed rows that were moved to another key before they were locked."""
    # Race: two of one key. A row that was moved since its candidates were read belongs to a key
    # that is not locked.
    if not rows:
        return ()
    now = column(question, rows, next(iter(wanted.keys.values())).groups.column)
    return [held.pk for held in rows if now.get(held.pk) != wanted.keys[held.pk].value]


def late_keys(
    question: Question[Any], wanted: Wanted, pks: Sequence[Any], claimed: Collection[Any]
) -> Collection[Any]:
    """Return the keys of which more rows would be in flight than may be, with those claimed."""
    # Race: two of one key. A wanted row whose lease has lapsed is missed if its worker renews it.
    ours: dict[Any, list[Any]] = {}
    missed: dict[Any, list[Any]] = {}
    for pk in pks:
        where = ours if pk in claimed else missed
        where.setdefault(wanted.keys[pk].value, []).append(pk)
    late = []
    for absent in [missed[value] for value in missed if value in ours]:
        key = wanted.keys[absent[0]]
        if key.groups.lease is None:
            continue
        _reap(question, key, absent)
        own = ours[key.value]
        others = _marked(question, key.groups).filter(**{key.groups.column: key.value})
        if others.exclude(these(own)).count() + len(own) > (key.groups.most or len(own)):
            late.append(key.value)
    return late


def _reap(question: Question[Any], key: Key, pks: Sequence[Any]) -> int:
    """Take lapsed leases away from these rows of a locked key; return how many keep theirs."""
    if not pks:
        return 0
    groups = key.groups
    # Race: two of one key. The worker of a lapsed lease may be alive and renew it, because it
    # recognises its row by the lease alone. So the lease is taken away before a sibling is claimed.
    # A row that is locked may be in the middle of a renewal, and counts as in flight.
    free = lock_free(question, pks)
    if free:
        lapsed = _lapsed(question, groups).filter(these(free))
        # Only a row that is still pending has the mark of this processor. A person may have taken
        # it out of pending, or another processor, which shares the lease's column, may have it.
        if marked := [*question.still_pending(free).values_list("pk", flat=True)]:
            lapsed.filter(these(marked)).update(**resolve(groups.unmarked))
        assert groups.lease is not None
        lapsed.update(**{groups.lease.field: groups.lease.taken_away})
    own = _marked(question, groups).filter(these(pks), **{groups.column: key.value})
    return own.count()


def _lapsed(question: Question[Any], groups: Groups) -> QuerySet[Any]:
    assert groups.lease is not None
    return _marked(question, groups).filter(**{f"{groups.lease.field}__lte": DatabaseNow()})


def _marked(question: Question[Any], groups: Groups) -> QuerySet[Any]:
    assert groups.in_flight is not None
    return question.table.filter(groups.in_flight).order_by()
