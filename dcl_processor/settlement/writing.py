"""Stage 4: write to rows, by the lock that they have, or if they still have their mark."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from datetime import date
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldError
from django.db import OperationalError, connections
from django.db.models import Q, QuerySet

from dcl_processor.candidates.question import Question, these
from dcl_processor.compiled_sql.cache import key_of_value
from dcl_processor.compiled_sql.update import FENCE_SQL, FLIP, LOST, MORE, PENDING, CompiledUpdate
from dcl_processor.database.connection import current_transaction_id, is_in_transaction
from dcl_processor.database.contention import is_contention
from dcl_processor.exceptions import (
    InvalidDone,
    ProcessorError,
    StillPending,
    TransactionLost,
    Unsupported,
)
from dcl_processor.locking.row_locks import lock_free
from dcl_processor.values import Values, constants_of, resolve

from .outcome_values import UNWRITABLE, invalid_done

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


class NotWritten(InvalidDone):
    """An update has left out a row that exists: a trigger, a rule or a policy dropped it."""


def refuse_pending(processor: Definition[Any], question: Question[Any], pks: Sequence[Any]) -> None:
    """Raise ``StillPending`` if one of the rows is still pending."""
    for pk in question.still_pending(pks).values_list("pk", flat=True)[:1]:
        raise _still_pending(processor, [pk])
    claim, done = constants_of(processor.claim or {}), constants_of(processor.done or {})
    if claim and done and processor.lease is None:
        # Its claim alone keeps a row out of pending whose flip a trigger has put back.
        rows = question.table.filter(these(pks), **claim)
        for name, value in done.items():
            rows = rows.exclude(**{name: value})
        for pk in rows.values_list("pk", flat=True)[:1]:
            raise not_written(processor.name, [pk])


def _still_pending(processor: Definition[Any], pks: Sequence[Any]) -> StillPending:
    return StillPending(
        f"{processor.name}: expected {_named(pks)} to leave pending once it was handled, got a row "
        "that is still pending; make the handler or done change a column that pending tests."
    )


def write(
    question: Question[Any],
    pks: Sequence[Any],
    values: Values,
    processor: Definition[Any],
    transaction_id: str | None = None,
    *,
    is_flip: bool = False,
) -> None:
    """Write these columns and nothing else, by primary key.

    Never ``save()``, which would overwrite columns that another session has changed since. The
    keys are those of the claim, because a handler that deletes or copies its row changes
    ``row.pk``. ``transaction_id``: of the transaction that must still be open; raises
    ``TransactionLost``. ``is_flip``: the values are those of ``done``; raises ``InvalidDone`` if
    Django cannot build a statement from them.
    """
    if not values:
        return
    try:
        written = _update(question, pks, resolve(values), transaction_id)
    except UNWRITABLE as error:
        if is_flip:
            raise invalid_done(processor, error) from error
        if isinstance(error, FieldError):
            words = f"{processor.name}: expected done to name columns, got: {error}"
            raise InvalidDone(words) from error
        raise
    refuse_more(processor.name, pks, written)
    if written < len(pks):
        if transaction_id is not None:
            refuse_another(question.using, transaction_id)
        # A query is needed, because rows that the handler deleted have left pending, too.
        if _rows(question, pks).count() > written:
            raise not_written(processor.name, pks)


def _update(
    question: Question[Any], pks: Sequence[Any], values: Values, transaction_id: str | None
) -> int:
    # Race: flip without work. Another transaction may have replaced the one with the locks.
    fenced, written = transaction_id is not None, None
    model, using = question.model, question.using
    update = question.writes.to_write(model, using, values, many=len(pks) > 1, fenced=fenced)
    if update is not None:
        written = update.execute(pks, values, transaction_id=transaction_id)
    if written is None:
        fence = [] if transaction_id is None else [is_in_transaction(transaction_id)]
        written = update_rows(question, pks, values, *fence)
    return written


def update_rows(
    question: Question[Any], pks: Sequence[Any], values: Values, *conditions: Any
) -> int:
    """Write those of the rows that meet the conditions; return how many."""
    return question.table.filter(*conditions).filter(these(pks)).update(**values)


def checked_flips(
    question: Question[Any], writes: Sequence[tuple[Values, Sequence[Any]]], transaction_id: str
) -> list[tuple[str, Sequence[Any]]] | None:
    """Return statements that write the flips, each of which fails unless it writes its rows.

    A row that its handler has deleted is left out. ``None``: one flip has no compiled statement.
    """
    statements: list[tuple[str, Sequence[Any]]] = []
    model, using = question.model, question.using
    for values, pks in writes:
        if not values:
            statements.append((FENCE_SQL, [transaction_id]))
            continue
        try:
            update = question.writes.to_write(model, using, values, many=len(pks) > 1, fenced=True)
            if update is None:
                return None
            statement = update.checked(pks, values, transaction_id)
        except UNWRITABLE:
            return None  # which the update alone raises again, and explains
        if statement is None:
            return None
        statements.append(statement)
    return statements


def explained(
    error: BaseException, processor: Definition[Any], pks: Sequence[Any]
) -> BaseException:
    """Return the error in plain words if it is that of a checked flip, or of the look after it.

    ``pks``: of the batch whose flips were in the message.
    """
    found = re.search(f"{FLIP}({LOST}|{MORE})?|{PENDING}", str(error))
    if found is None:
        return error
    if found[0] == PENDING:
        return _still_pending(processor, pks)
    if found[1] == MORE:
        return not_unique(processor.name, pks)
    return TransactionLost() if found[1] else not_written(processor.name, pks)


def refuse_moved(
    question: Question[Any], rows: Mapping[Any, Any], processor: Definition[Any]
) -> None:
    """Raise for a row that its handler moved to another key; ``rows``: by their keys.

    The row would count as done, because its old key is gone, and be pending under the new key.
    """
    for pk, row in rows.items():
        key = row.pk if isinstance(row.pk, tuple) else (row.pk,)
        # A copy of a row has another key, too, but the original row still exists.
        moved = row.pk != pk and None not in key and not _rows(question, [pk]).exists()
        if moved and _rows(question, [row.pk]).exists():
            raise ProcessorError(
                f"{processor.name}: expected the handler not to change its row's primary key, got "
                f"row {pk} with the key {row.pk}; change another column, or create a new row."
            )


def refuse_another(using: str, transaction_id: str) -> None:
    """Raise ``TransactionLost`` unless the open transaction has this id."""
    if current_transaction_id(using) != transaction_id:
        raise TransactionLost


def not_written(name: str, pks: Sequence[Any]) -> ProcessorError:
    got = "it not written although it exists" if len(pks) == 1 else "fewer written than exist"
    return NotWritten(
        f"{name}: expected the update to write {_named(pks)}, got {got}; look for a trigger, a "
        "rule or row-level security that drops the update."
    )


def refuse_more(name: str, pks: Sequence[Any], written: int) -> None:
    """Raise if an update has written more rows than there are keys."""
    if written > len(pks):
        raise not_unique(name, pks)


def not_unique(name: str, pks: Sequence[Any]) -> Unsupported:
    """Return the error for an update that wrote to more rows than there are keys."""
    return Unsupported(
        f"{name}: expected one row for each key, got an update of {_named(pks)} that wrote to "
        "more, which was rolled back; give the table a unique key, and make it the model's primary "
        "key."
    )


def _rows(question: Question[Any], pks: Sequence[Any]) -> QuerySet[Any]:
    return question.table.filter(these(pks))


def _named(pks: Sequence[Any]) -> str:
    return f"row {pks[0]}" if len(pks) == 1 else f"rows {', '.join(map(str, pks[:5]))} and others"


# --- which rows one statement can write


# Equal if they call the same function; other callables may define any comparison, or none.
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def group(flips: Mapping[Any, Values]) -> list[tuple[Values, list[Any]]]:
    """Group rows by the values of their flips, whose callables are called.

    A callable is called for each row, as it would be without a batch, because it may return a
    token, which two rows must not share. The exception is a clock: it returns the time of the
    statement, and a call for each row would make a statement for each row.
    """
    moments: dict[Any, date] = {}
    groups: dict[Hashable, tuple[Values, list[Any]]] = {}
    for pk, values in flips.items():
        resolved = {name: _call(value, moments) for name, value in values.items()}
        # With the user's values, == and hash() may fail, or have another meaning.
        alike = tuple((name, key_of_value(value)) for name, value in resolved.items())
        _, pks = groups.setdefault(alike, (resolved, []))
        pks.append(pk)
    return list(groups.values())


def _call(value: Any, moments: dict[Any, date]) -> Any:
    if not callable(value):
        return value
    called = value if type(value) in _FUNCTIONS else id(value)
    if called in moments:
        return moments[called]
    given = value()
    if isinstance(given, date):
        moments[called] = given
    return given


# --- compare and set: a row is written only if columns still have the values this worker wrote


#: Each column, with all values that this worker may have written to it.
Expected = Mapping[str, Sequence[Any]]


def compare_and_set(question: Question[Any], pk: Any, expected: Expected, values: Values) -> int:
    """Write a row if it has the expected values; return how many rows were written, 0 or 1."""
    # Race: lost lease that writes. A row that another worker has taken over does not match these
    # columns, whichever of the two statements below writes it.
    update, only = _compiled(question, expected, values)
    written = None if update is None else update.execute([pk], values, expected=only)
    return compare_and_set_all(question, [pk], expected, values) if written is None else written


def statement_if_free(
    question: Question[Any], pk: Any, expected: Expected, values: Values
) -> tuple[str, Sequence[Any]] | None:
    """Return one statement that writes a row unless another session has locked it.

    Only if it has the expected values. ``None``: there is no such statement.
    """
    # Race: lost lease that writes. As above.
    update, only = _compiled(question, expected, values)
    return None if update is None else update.if_free(pk, values, only)


def _compiled(
    question: Question[Any], expected: Expected, values: Values
) -> tuple[CompiledUpdate | None, Values]:
    """Return the statement that is compiled once, if there is one, and what it compares."""
    only = {column: known[0] for column, known in expected.items() if len(known) == 1}
    # NULL needs a comparison of its own.
    if len(only) != len(expected) or [1 for each in only.values() if each is None]:
        return None, only
    return question.writes.to_write(question.model, question.using, values, only), only


def compare_and_set_all(
    question: Question[Any], pks: Sequence[Any], expected: Expected, values: Values
) -> int:
    """Write to the rows that have the expected values; return how many were written."""
    return update_rows(question, pks, values, _condition(expected))


def compare_and_set_free(
    question: Question[Any], pks: Sequence[Any], expected: Expected, values: Values
) -> int:
    """Do the same for the rows that no other session has locked, in a transaction."""
    if len(pks) == 1 and (alone := statement_if_free(question, pks[0], expected, values)):
        with connections[question.using].cursor() as cursor:
            try:
                cursor.execute(*alone)
            except OperationalError as error:
                if is_contention(error):
                    return 0  # MariaDB refuses a row that is locked
                raise
            written: int = cursor.rowcount
        return written
    if not connections[question.using].features.has_select_for_no_key_update:
        return compare_and_set_all(question, lock_free(question, pks), expected, values)
    # The lock would be one more message.
    free = (
        question.table.filter(these(pks))
        .order_by()
        .select_for_update(skip_locked=True, no_key=True)
    )
    ours = _condition(expected) & Q(pk__in=free.values("pk"))
    return update_rows(question, pks, values, ours)


def is_held(question: Question[Any], pk: Any, expected: Expected) -> bool:
    """Return whether a row has the expected values now."""
    return question.table.filter(_condition(expected), pk=pk).exists()


def _condition(expected: Expected) -> Q:
    """Return the expected values as a condition of a query."""
    ours = Q()
    for column, known in expected.items():
        ours &= Q(**{column: known[0]}) if len(known) == 1 else Q(**{f"{column}__in": known})
    return ours
