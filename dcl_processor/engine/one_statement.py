"""Claim and mark in one statement and one round trip, if the database supports it.

Only an own-table question allows this, because PostgreSQL checks it again on the newest version of
each locked row. A question that spans tables would be checked on the statement's old snapshot, so
three statements lock the rows, check them again and write them instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.question import KeyList, Question
from dcl_processor.compiled_sql.claim_update import ClaimUpdate, CompiledClaim
from dcl_processor.locking.wanted import Wanted

if TYPE_CHECKING:
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
