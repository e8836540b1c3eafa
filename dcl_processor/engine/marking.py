"""Claim rows and put a mark on them, committed before any handler is called.

An own-table question allows one statement for all of it, because PostgreSQL checks it again on the
newest version of each locked row. A question that spans tables would be checked on the statement's
old snapshot, so that there, and on other databases, the rows are locked, checked again and written
by statements of one transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connections
from django.db.models import Q, QuerySet

from dcl_processor.candidates.question import KeyList, Question, these
from dcl_processor.clock import recognisable_columns
from dcl_processor.compiled_sql.claims import ClaimUpdate, CompiledClaim
from dcl_processor.exceptions import InvalidDone, ProcessorError, StillPending
from dcl_processor.execution.handler import Failed
from dcl_processor.interrupts import ends_the_run
from dcl_processor.settlement import rehearsal
from dcl_processor.settlement.writing import refuse_more
from dcl_processor.values import Values, resolve

from .claim import claim
from .key_claim import claim_in_turn
from .session import Session
from .settlement import (
    COMMIT,
    Batch,
    Claimed,
    Held,
    Marked,
    Missed,
    NotSettled,
    Settlement,
    Statement,
    Wanted,
    show,
)

if TYPE_CHECKING:
    from .lane import Lane
    from .settlement import Mark


def claim_and_mark(lane: Lane, batch: Batch, mark: Mark) -> None:
    """Lock the rows, check them again, mark those that are still pending, and commit."""
    if batch.wanted.keys:
        _in_turn(lane, batch, mark)
    # The flips are verified in a transaction, and a mark that is to be looked at needs one.
    elif batch.question is lane.simple_question or lane.is_one_statement(batch):
        _in_one_statement(lane, batch, mark)
    else:
        claimed = claim(lane.session, batch.question, batch.wanted)
        _mark_claimed(lane, batch, mark, claimed)


def _in_one_statement(lane: Lane, batch: Batch, mark: Mark) -> None:
    question, wanted, session = batch.question, batch.wanted, lane.session
    found, params = statement(question, mark, wanted)
    answer = session.exchange(Statement(found.sql, params))
    before, after_it = found.marks(answer)
    if len(answer) > len(after_it):
        _put_back(question, mark, before, after_it, after_it.keys())
        refuse_more(lane.processor.name, [*after_it], len(answer))
    rows: dict[Any, Any] = {}
    try:
        rows = {row.pk: row for row in found.rows(answer)}
    finally:
        if len(rows) < len(after_it):
            # The claim is committed, so rows that cannot be passed to the handler are put back.
            _put_back(question, mark, before, after_it, after_it.keys() - rows.keys())
    held = [Held(pk, rows[pk]) for pk in wanted.pks if pk in rows]
    pks = wanted.pks if wanted.choice is None else wanted.visited(rows)
    missed = {pk: Missed.ABSENT for pk in pks if pk not in rows}
    batch.claimed = Claimed(held, missed, driver=session.connection.connection)
    lane.source.note_claim(batch)
    _record(lane, batch, mark, before, after_it)


def _in_turn(lane: Lane, batch: Batch, mark: Mark) -> None:
    """Claim and mark rows of keys in the transaction that has the keys locked."""
    question, wanted, session = batch.question, batch.wanted, lane.session
    if not lane.is_one_statement(batch):
        _mark_claimed(lane, batch, mark, claim_in_turn(session, question, wanted))
        return
    before, after_it = dict[Any, Values](), dict[Any, Values]()

    def claim_rows(session: Session, question: Question[Any], wanted: Wanted) -> Claimed:
        found, params = statement(question, mark, wanted)
        answer = session.execute(Statement(found.sql, params))
        for all_of_them, some in zip((before, after_it), found.marks(answer), strict=True):
            all_of_them.update(some)
        rows = {row.pk: row for row in found.rows(answer)}
        held = [Held(pk, rows[pk]) for pk in wanted.pks if pk in rows]
        missed = {pk: Missed.ABSENT for pk in wanted.pks if pk not in rows}
        return Claimed(held, missed, driver=session.connection.connection)

    claimed = claim_in_turn(session, question, wanted, claim_rows)
    ours = {held.pk for held in claimed.rows}
    _put_back(question, mark, before, after_it, after_it.keys() - ours)
    # Not before the statements were answered: what keeps them from that is no row's failure.
    batch.claimed = claimed
    _record(lane, batch, mark, before, after_it)
    _commit(lane, batch, mark)


def _mark_claimed(lane: Lane, batch: Batch, mark: Mark, claimed: Claimed) -> None:
    """Mark the rows that are locked in the open transaction, and commit."""
    batch.claimed = claimed
    lane.source.note_claim(batch)
    rows = claimed.rows
    if rows:
        lane.run.verify(rows[0])
        _write(lane, batch, mark)
        _check_marked(lane, batch, mark)
    _commit(lane, batch, mark)


def _commit(lane: Lane, batch: Batch, mark: Mark) -> None:
    session = lane.session
    # Race: double claim. The mark is committed before any handler is called, and hides the row
    # from other workers after the lock is released.
    try:
        session.settle(Settlement(batch, (COMMIT,)))
    except NotSettled as error:
        raised = error.__cause__
        assert raised is not None
        session.rollback()
        assert batch.claimed is not None
        if ends_the_run(raised) or not session.was_committed(batch.claimed.transaction_id):
            # An interrupt may come before or after the commit. A mark with a time shows later
            # whether it was committed, and whether it is still this worker's.
            if not ends_the_run(raised) or mark.time is None:
                _forget(batch.rows)
            raise raised from None


def _forget(rows: Collection[Held]) -> None:
    for held in rows:
        held.marked = None  # type: ignore[assignment]  # as before the claim


def _write(lane: Lane, batch: Batch, mark: Mark) -> None:
    """Mark the rows in the transaction that holds their locks, and update the instances."""
    question, rows = batch.question, batch.rows
    names = [*mark.values]
    table = question.table.filter(these([held.pk for held in rows]))
    before = _read(table, names)
    refuse_more(lane.processor.name, [held.pk for held in rows], table.update(**mark.values))
    # The values are read back, because the time is the database's, a column may store a value in
    # its own form, and generated columns may depend on it.
    computed = [f.attname for f in question.model._meta.concrete_fields if f.generated]
    found = _read(table, [*names, *computed])
    for held in rows:
        show(held.row, found[held.pk])
    after = {pk: {name: read[name] for name in names} for pk, read in found.items()}
    _record(lane, batch, mark, before, after)


def _read(rows: QuerySet[Any], names: list[str]) -> dict[Any, Values]:
    found = rows.values_list("pk", *names)
    return {pk: dict(zip(names, values, strict=True)) for pk, *values in found}


def _record(
    lane: Lane, batch: Batch, mark: Mark, before: Mapping[Any, Values], after: Mapping[Any, Values]
) -> None:
    """Record the old and the new values of the marked columns, and refuse rows without the new.

    A trigger may keep the old value in some rows. Such a row is still pending, or cannot be
    recognised, so that its handler would be called in every run.
    """
    using, constants = batch.question.using, lane.run.kept_constants
    was, became = before, after
    if not settings.USE_TZ:
        was, became = recognisable_columns(before, using), recognisable_columns(after, using)
    assert batch.claimed is not None
    for held in batch.claimed.rows:
        old, new = was[held.pk], became[held.pk]
        held.marked = Marked(old, new)
        names = constants.keys() & new.keys()
        try:
            wrong = [name for name in names if new[name] != constants[name]]
        except Exception:  # noqa: BLE001  # the comparison is the value's own
            wrong = [*names]
        wrong = [name for name in wrong if _differs(batch.question, name, new, constants)]
        if mark.time is not None and new[mark.time] in (None, old[mark.time]):
            wrong.append(mark.time)
        if wrong:
            held.refused = Failed(_not_kept(lane, held, wrong[0]), unstarted=True)


def _differs(question: Question[Any], name: str, new: Values, constants: Values) -> bool:
    """Return whether a column has another value, as the database has it."""
    connection, field = connections[question.using], question.model._meta.get_field(name)
    one, other = (field.get_db_prep_value(each[name], connection) for each in (new, constants))
    return bool(one != other)


def _not_kept(lane: Lane, held: Held, column: str) -> ProcessorError:
    return ProcessorError(
        f"{lane.processor.name}: expected {column!r} of row {held.pk} to contain what the claim "
        "wrote, got another value, so the handler was not called; look for a trigger that "
        "restores the old value."
    )


def _check_marked(lane: Lane, batch: Batch, mark: Mark) -> None:
    """Raise if a mark leaves its row pending, where another worker would claim it.

    Under a lease raise if it does not, because no worker would take the row over.
    """
    option, question, processor = mark.option, batch.question, lane.processor
    if option is None or not lane.run.needs_check(option):
        return
    pks = [held.pk for held in batch.rows]
    asked = question.still_pending(pks).values_list("pk", flat=True)
    if mark.is_lease:
        still = set(asked)
        for pk in [pk for pk in pks if pk not in still]:
            raise InvalidDone(rehearsal.not_pending(processor, pk))
        return
    for pk in asked[:1]:
        raise StillPending(rehearsal.still_pending(processor, option, pk))


def _put_back(
    question: Question[Any],
    mark: Mark,
    before: Mapping[Any, Values],
    after: Mapping[Any, Values],
    pks: Collection[Any],
) -> None:
    was, became = (recognisable_columns(each, question.using) for each in (before, after))
    for pk in pks:
        back = resolve(mark.put_back(was[pk]))
        question.table.filter(Q(**became[pk]), pk=pk).update(**back)


# --- claim and mark in one statement and one round trip, if the database supports it


def suits(question: Question[Any]) -> bool:
    """Return whether the database supports such a statement, and the question allows it."""
    features = connections[question.using].features
    # Only a database with NO KEY has an UPDATE … FROM a locking SELECT that returns its rows.
    able = features.has_select_for_no_key_update and features.has_select_for_update_skip_locked
    return bool(able and question.own_table and len(question.model._meta.pk_fields) == 1)


def statement(
    question: Question[Any], mark: Mark, wanted: Wanted
) -> tuple[ClaimUpdate[Any], Sequence[Any]]:
    """Return the statement that fits, and its parameters."""
    pks, values, using = wanted.pks, mark.values, question.using
    many = len(pks) > 1
    make = partial(
        CompiledClaim[Any],
        question.model,
        using,
        question.narrowed,
        wanted.first,
        values,
        many=many,
    )
    compiled = question.statements.get(("claim and mark", many, wanted.choice, mark.name), make)
    params = None if compiled is None else compiled.params(pks, values)
    if compiled is not None and params is not None:
        return compiled.claim, params
    keys = KeyList(pks)
    asked = question.narrowed(keys)
    claim = ClaimUpdate(using, asked, wanted.first(asked, keys), values)
    return claim, claim.params
