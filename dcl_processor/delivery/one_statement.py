"""Claim and mark in one statement and one round trip, if the database supports it.

Only an own-table question allows this, because PostgreSQL checks it again on the newest version of
each locked row. A question that spans tables would be checked on the statement's old snapshot, so
three statements lock the rows, check them again and write them instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import NotSupportedError, connections, transaction
from django.db.models import Model, Q

from dcl_processor.candidates.question import KeyList, Question
from dcl_processor.clock import recognisable
from dcl_processor.compiled_sql.claim_update import ClaimUpdate, CompiledClaim
from dcl_processor.locking.claiming import Claimed, Miss
from dcl_processor.locking.wanted import Wanted
from dcl_processor.values import resolve

if TYPE_CHECKING:
    from dcl_processor.values import Values

    from .batch import Batch
    from .marks import Mark

#: Tables, by alias and model, for which the database refuses such a statement because a rule turns
#: it into several. Only sending a statement shows this.
refused: set[tuple[str, type[Model]]] = set()


def suits(question: Question[Any]) -> bool:
    """Return whether the database supports such a statement, and the question allows it."""
    if (question.using, question.model) in refused:
        return False
    features = connections[question.using].features
    # Only a database with NO KEY has an UPDATE … FROM a locking SELECT that returns its rows.
    able = features.has_select_for_no_key_update and features.has_select_for_update_skip_locked
    return bool(able and question.own_table and len(question.model._meta.pk_fields) == 1)


def claim_and_mark(
    batch: Batch[Any], mark: Mark
) -> tuple[dict[Any, Values], dict[Any, Values]] | None:
    """Claim the batch's rows and mark them, with one commit for the statement.

    A settlement that waits is committed with it.

    Returns the old and the new values of the claimed rows' marked columns; ``None`` if nothing was
    done because the table is in ``refused``.
    """
    question, wanted = batch.question, batch.wanted
    # An error must not break the transaction that Django's TestCase keeps open.
    inside = connections[question.using].in_atomic_block
    try:
        with (
            transaction.atomic(using=question.using) if inside else nullcontext(),
            batch.context.transactions.one_statement(question.using),
        ):
            claim, params = statement(question, mark, wanted)
            answers = claim.execute(params)
    except NotSupportedError:
        refused.add((question.using, question.model))
        return None
    before, after = claim.marks(answers)
    found: dict[Any, Any] = {}
    try:
        found = {row.pk: row for row in claim.rows(answers)}
    finally:
        # The claim is committed, so rows that cannot be passed to the handler are put back.
        _put_back(question, mark, before, after, after.keys() - found.keys())
    rows = {pk: found[pk] for pk in wanted.pks if pk in found}
    missed = [pk for pk in wanted.visited(found) if pk not in found]
    batch.take(Claimed(rows, dict.fromkeys(missed, Miss.ABSENT)))
    return before, {pk: after[pk] for pk in rows}


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


def _put_back(
    question: Question[Any],
    mark: Mark,
    before: Mapping[Any, Values],
    after: Mapping[Any, Values],
    pks: Collection[Any],
) -> None:
    for pk in pks:
        table = question.table
        ours = _recognisable(question, after[pk])
        back = resolve(mark.put_back(_recognisable(question, before[pk])))
        table.filter(Q(**ours), pk=pk).update(**back)


def _recognisable(question: Question[Any], values: Values) -> Values:
    return {name: recognisable(value, question.using) for name, value in values.items()}
