"""Try the flips on one row and roll them back, before any handler is called."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from django.db import Error, connections, transaction
from django.db.models import Model, QuerySet, Value
from django.db.models.functions import Now

from dcl_processor import clock
from dcl_processor.candidates.question import Question, decided, keeps_all
from dcl_processor.clock import DatabaseNow
from dcl_processor.database.connection import has_id
from dcl_processor.database.contention import is_contention, refuses_constant, unwritable
from dcl_processor.definition.kinds import rules_of
from dcl_processor.definition.model_columns import by_attname, written
from dcl_processor.exceptions import InvalidDone, InvalidOption, ProcessorError, StillPending
from dcl_processor.interrupts import ends_the_run
from dcl_processor.masking import described
from dcl_processor.values import Values, constants_of

from . import outcome_values, writing

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


class RowRefused(Exception):
    """Contains why the flip of one row cannot be written; other rows' flips may be valid."""

    def __init__(self, error: ProcessorError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the rehearsal on one row proves for the other rows.

    ``unproven``: the options whose flip may leave another row pending, although this row left.
    ``has_rules``: the table has a rule that rewrites statements, or is a view. ``has_triggers``: a
    trigger may write to a row that is flipped, or move it elsewhere.
    ``kept``: the values with which a claim's constants are read back, by ``attname``.
    ``refused``: what the database has answered to the flip of this row, which a handler may change;
    ``""``: it took it.
    """

    unproven: Collection[str]
    kept: Values
    has_rules: bool = False
    has_triggers: bool = False
    refused: str = ""


def rehearse(processor: Definition[Any], question: Question[Any], row: Model, pk: Any) -> Rehearsal:
    """Flip, check, roll back: raise ``StillPending`` before any handler runs, not after.

    Raises ``RowRefused`` if the flip is a function of the row, which may work for the next row.
    """
    unproven: set[str] = set()
    _check_foreign_keys(processor, question)
    has_rules, has_triggers, has_policies = _rules_and_triggers(processor, question)
    if processor.claim and processor.lease and not _stays_pending(processor, question, pk):
        unproven.add("claim")
    refused = list[str]()
    unproven.update(_not_proven(processor, question, pk, refused, has_triggers=has_triggers))
    _check_put_back(processor, question, pk)
    try:
        kept = _check_kept(processor, question, pk)
    except (writing.NotWritten, InvalidOption) as error:
        if isinstance(error, InvalidOption) and not has_triggers:
            raise
        raise RowRefused(error) from error  # a trigger may do that to this row alone
    if not processor._has_fixed_flip:
        _rehearse_function(processor, question, row, pk, refused)
    # A trigger may put back the flip of another row, which is then still pending, although the
    # update has written it. A flip that is the mark of a claim is compared when it is read back.
    is_mark = bool(rules_of(processor).marked_by) and not processor.claim
    varies = not processor._has_fixed_flip or has_policies or (has_triggers and not is_mark)
    if varies:
        unproven.add("done")
    return Rehearsal(unproven, kept, has_rules, has_triggers, "".join(refused))


def _not_proven(
    processor: Definition[Any],
    question: Question[Any],
    pk: Any,
    refused: list[str],
    *,
    has_triggers: bool,
) -> Iterator[str]:
    """Yield the options whose flip may leave another row pending; raise if it leaves this one.

    ``refused`` gets the words for a flip that the database refuses in this row. Raises
    ``InvalidDone`` if it refuses that in every row.
    """
    for option, values in _fixed(processor):
        writes = _written(processor, question, option, values)
        raised = outcome_values.UNWRITABLE if option == "done" else ()
        errors = list[Exception]()
        effect = _rehearsed(processor, question, pk, writes, raised, errors=errors)
        for error in errors if option != "failed" else ():
            words = _refusal(processor, question, pk, (option, values), error)
            if refuses_constant(error) and all(map(_is_constant, values.values())):
                raise InvalidDone(f"{words}; no handler was called.") from error
            refused += [words] * (option == "done")
        if effect is FlipEffect.STILL_PENDING:
            said = still_pending(processor, option, pk, values)
            if has_triggers:  # one may put back the flip of this row alone
                raise RowRefused(StillPending(f"{said[:-1]}, or look for a trigger."))
            raise StillPending(said)
        if effect is not FlipEffect.EVERY_ROW_LEAVES:
            yield option


def _fixed(processor: Definition[Any]) -> Iterator[tuple[str, Values]]:
    """Yield the options that are the same for every row, and have to take it out of pending."""
    options = {"claim": processor.lease is None, "failed": True, "done": processor._has_fixed_flip}
    for option, is_to_leave in options.items():
        values = getattr(processor, option)
        if is_to_leave and values:
            yield option, values


def _check_foreign_keys(processor: Definition[Any], question: Question[Any]) -> None:
    """Raise ``InvalidDone`` if a constant names a row that there is not.

    Most databases would refuse it at the COMMIT alone, after the handler's work, in each run.
    """
    for option, values in written(processor):
        for name, value in constants_of(values).items():
            field: Any = question.model._meta.get_field(name)
            if value is None or not field.is_relation:
                continue
            key = getattr(value, field.target_field.attname, value)
            there = QuerySet[Any](field.related_model, using=question.using)
            if field.db_constraint and not there.filter(**{field.target_field.name: key}).exists():
                raise InvalidDone(
                    f"{processor.name}: expected {option}={{{name!r}: …}} to name a row of "
                    f"{field.related_model._meta.label}, got {key!r}, and no such row; no handler "
                    "was called."
                )


def _stays_pending(processor: Definition[Any], question: Question[Any], pk: Any) -> bool:
    """Return whether it is known that every row stays pending under its mark and its lease.

    Raises ``InvalidDone`` if this row does not: when its worker dies, no other would take it over.
    """
    assert processor.lease is not None
    lease, at = processor.lease, processor.claimed_at
    mark = {
        **(processor.claim or {}),
        **({at: DatabaseNow()} if at else {}),
        lease.field: DatabaseNow() + timedelta(seconds=lease.seconds),
    }
    effect = _rehearsed(processor, question, pk, [mark])
    if effect is FlipEffect.UNKNOWN:
        return False
    if effect is not FlipEffect.STILL_PENDING:
        raise InvalidDone(not_pending(processor, pk))
    written = by_attname(question.model, mark)
    # The time of the lease differs from row to row, but is a time of now in all of them.
    constants = {name for name, value in written.items() if _is_constant(value)} | {lease.field}
    return keeps_all(question.unfiltered, constants, written)


def not_pending(processor: Definition[Any], pk: Any) -> str:
    """Return the message for a row that its mark takes out of pending, found before its handler."""
    return (
        f"{processor.name}: expected claim={dict(processor.claim or {})!r} to keep row {pk} in "
        "pending under its lease, so that another worker can take it over, got a row that left "
        f"pending; no handler was called; add {_marked_form(processor)} to pending."
    )


def _marked_form(processor: Definition[Any]) -> str:
    """Return the condition to add to pending for rows with the processor's mark and a lease.

    Without the lease it would also match rows that other code marks in the same way.
    """
    constants = constants_of(processor.claim or {})
    marks = [f"{name}={value!r}" for name, value in constants.items()]
    leased = f"{processor.lease.field}__isnull=False" if processor.lease else ""
    return f"… | Q({', '.join([*marks, leased])})"


_RULES_AND_TRIGGERS = """SELECT bool_or(relhasrules), bool_or(EXISTS (
    SELECT FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid
    JOIN pg_language ON pg_language.oid = prolang
    WHERE tgrelid = pg_class.oid
    AND NOT tgisinternal AND tgenabled IN ('O', 'A') AND tgtype & 16 <> 0
    AND (lanname <> 'plpgsql' OR prosrc ~* %s OR (tgtype & 2 <> 0 AND prosrc ~* %s))
)), bool_or(relrowsecurity) FROM pg_class WHERE oid = ANY(%s::regclass[])"""

_TRIGGERS = {
    "mysql": "SELECT count(*) FROM information_schema.triggers WHERE event_manipulation = 'UPDATE' "
    "AND trigger_schema = DATABASE() AND event_object_table",
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name",
}

#: How the source of a trigger in PL/pgSQL writes to the row: to a column of the flip, to the whole
#: row, or by a statement of its own. One that sets the time of an update, or notes it elsewhere,
#: does none of these, and costs nothing.
_WRITES = (
    r'\mnew\s*\.\s*"?({columns})"?\s*:?=|\mnew\s*:?=|\minto\s+new\M|\mreturn\s+old\M'
    r"|\mupdate\s[^;]*\mset\M|\mdelete\s+from\M"
)


def _rules_and_triggers(
    processor: Definition[Any], question: Question[Any]
) -> tuple[bool, bool, bool]:
    """Return whether PostgreSQL rewrites statements on the tables of a row, or they are views.

    And whether a trigger that may write to what a settlement writes, or a mark, fires for an UPDATE
    of one of them, as the 16 in its type says; the 2 says that it fires before. Elsewhere than on
    PostgreSQL, whether there is a trigger. And whether row-level security is on.
    """
    connection = connections[question.using]
    fields = question.model._meta.concrete_fields
    tables = sorted({field.model._meta.db_table for field in fields})
    with connection.cursor() as cursor:
        if not has_id(connection):
            named = ", ".join(["%s"] * len(tables))
            cursor.execute(f"{_TRIGGERS[connection.vendor]} IN ({named})", tables)
            return False, bool(cursor.fetchone()[0]), False
        marks = {processor.claimed_at, processor.lease and processor.lease.field}
        flips = (processor.done, processor.failed, processor.claim)
        written = marks.union(*[each or () for each in flips])
        columns = [field.column for field in fields if {field.name, field.attname} & written]
        writes = _WRITES.format(columns="|".join(map(re.escape, columns)) or "no column")
        quoted = [connection.ops.quote_name(table) for table in tables]
        cursor.execute(_RULES_AND_TRIGGERS, [writes, r"\mreturn\s+null\M", quoted])
        rules, triggers, policies = cursor.fetchone()
    return bool(rules), bool(triggers), bool(policies)


def _refusal(
    processor: Definition[Any],
    question: Question[Any],
    pk: Any,
    flip: tuple[str, Values],
    error: Exception,
) -> str:
    """Return the words for a flip that the database refuses, with the first column to blame."""
    option, values = flip
    column = next(
        (
            f" for column {name!r}"
            for name, value in values.items()
            if _rehearsed(processor, question, pk, [{name: value}]) is FlipEffect.UNKNOWN
        ),
        "",
    )
    return (
        f"{processor.name}: expected the database to accept {option}={dict(values)!r:.200} for row "
        f"{pk}, got {described(error)!r}{column}; change {option}, the constraint or the right"
    )


def _rehearse_function(
    processor: Definition[Any], question: Question[Any], row: Model, pk: Any, refused: list[str]
) -> None:
    """Try a flip that is a function of the row alone; a flip that needs the result has to wait."""
    try:
        if processor._flip_needs_result:
            return
        values = outcome_values.given(processor, row)
        writes = _written(processor, question, "done", values)
        errors = list[Exception]()
        try:
            effect = _rehearsed(
                processor, question, pk, writes, outcome_values.UNWRITABLE, errors=errors
            )
        except outcome_values.UNWRITABLE as error:
            raise outcome_values.invalid_done(processor, error) from error
        refused += [_refusal(processor, question, pk, ("done", values), each) for each in errors]
        if effect is FlipEffect.STILL_PENDING:
            raise StillPending(still_pending(processor, "done", pk, values))
    except ProcessorError as error:
        raise RowRefused(error) from error


def _written(
    processor: Definition[Any], question: Question[Any], option: str, values: Values
) -> list[Values]:
    """Return the writes to a row until it is settled, as one write if that is equivalent."""
    claim = {} if option == "claim" else processor.claim or {}
    if option == "done":
        values = outcome_values.with_cleared_retry(processor, values)
    if claim and processor.lease is not None:
        # Both are removed by every settlement, and ``reset`` is written unless the row is done.
        base = {} if option == "done" else processor.reset or {}
        times = [name for name in (processor.claimed_at, processor.lease.field) if name]
        model = question.model
        values = {**by_attname(model, base), **dict.fromkeys(times), **by_attname(model, values)}
        claim = by_attname(model, claim)
    if claim and any(hasattr(value, "resolve_expression") for value in values.values()):
        return [claim, values]  # an expression reads what the claim wrote
    return [{**claim, **values}]


def _check_put_back(processor: Definition[Any], question: Question[Any], pk: Any) -> None:
    """Raise ``InvalidDone`` if ``reset`` takes a claimed row that is put back out of pending."""
    reset = processor.reset if processor.claim else None
    if not reset:
        return
    writes = _written(processor, question, "reset", reset)
    known = FlipEffect.STILL_PENDING, FlipEffect.UNKNOWN
    if _rehearsed(processor, question, pk, writes) not in known:
        raise InvalidDone(
            f"{processor.name}: expected reset={dict(reset)!r} to put a claimed row back into "
            f"pending, got row {pk} not pending after it; no handler was called."
        )


def _check_kept(processor: Definition[Any], question: Question[Any], pk: Any) -> Values:
    """Return the values with which a claim's constants are read back.

    Raises unless the columns return the values written, because a settlement compares them.
    """
    constants, times = _marks(processor, question, pk)
    if not constants and not times:
        return {}
    table = question.table
    with transaction.atomic(using=question.using):
        writing.write(question, [pk], {**constants, **times}, processor)
        kept = table.filter(pk=pk).values(*constants, *times).get()
        row, read = table.filter(pk=pk), {n: clock.recognisable(kept[n], table.db) for n in times}
        lost = [n for n, v in constants.items() if not row.filter(**{n: v}).exists()]
        # A field that truncates times would match in a query, and be the same for all workers.
        lost += [n for n, t in times.items() if read[n] != t]
        transaction.set_rollback(True, using=question.using)
    for name in lost:
        what, fix = repr(constants.get(name)), "claim another value"
        if name in times:
            what = f"the time {times[name]}"
            fix = "make it one with a time zone and six digits, or look for a trigger"
        raise InvalidOption(
            f"{processor.name}: expected {question.model._meta.label}.{name} to keep {what}, by "
            f"which a claimed row is recognised, got {kept[name]} back; {fix}."
        )
    meta = question.model._meta
    return {meta.get_field(name).attname: kept[name] for name in constants}


def _marks(
    processor: Definition[Any], question: Question[Any], pk: Any
) -> tuple[dict[str, Any], dict[str, datetime]]:
    """Return the mark of a claimed row: the constants, and the columns that contain a time."""
    constants: dict[str, Any] = {}
    for option in rules_of(processor).marked_by:
        if getattr(processor, option):
            constants = constants_of(getattr(processor, option))
            break
    # On a lease, the time of the claim distinguishes nothing.
    columns = [processor.lease.field if processor.lease else processor.claimed_at]
    if not any(columns):
        return constants, {}
    # None of the six digits is 0, so that a column which cuts them is found at any time.
    now = clock.read(question.table, [pk])
    assert now is not None  # the row is locked, so it exists
    return constants, {name: now.replace(microsecond=654_321) for name in columns if name}


class FlipEffect(Enum):
    """Whether a flip took a row out of pending."""

    STILL_PENDING = "still pending"
    #: The flip may still leave another row pending.
    THIS_ROW_LEFT = "this row left"
    #: The database refused it, as it may not once the handler has done its part.
    UNKNOWN = "unknown"
    EVERY_ROW_LEAVES = "every row leaves"


def _rehearsed(
    processor: Definition[Any],
    question: Question[Any],
    pk: Any,
    writes: Sequence[Values],
    raised: tuple[type[Exception], ...] = (),
    *,
    errors: list[Exception] | None = None,
) -> FlipEffect:
    """Try writes on a row; ``errors`` gets the one by which the database refuses them."""
    meta, errors = question.model._meta, [] if errors is None else errors
    values = {name: value for write in writes for name, value in write.items()}
    constants = {meta.get_field(n).attname for n, value in values.items() if _is_constant(value)}
    alike = decided(question.unfiltered, constants)
    try:
        return _tried(processor, question, pk, writes, alike)
    except writing.NotWritten as error:
        errors.append(error)
        return FlipEffect.UNKNOWN
    except Error as error:
        has_ended = connections[question.using].needs_rollback  # the transaction with the lock
        if has_ended or is_contention(error) or unwritable(error, question.using) is not None:
            raise
        errors.append(error)
        return FlipEffect.UNKNOWN
    except Exception as error:
        if ends_the_run(error) or isinstance(error, (ProcessorError, *raised)):
            raise
        return FlipEffect.UNKNOWN  # a check of the package's own costs no row anything


def _tried(
    processor: Definition[Any],
    question: Question[Any],
    pk: Any,
    writes: Sequence[Values],
    alike: QuerySet[Any] | None,
) -> FlipEffect:
    """Write, look, and roll back; ``alike``: the rows that would show that not every one leaves."""
    with transaction.atomic(using=question.using):
        for each in writes:
            writing.write(question, [pk], each, processor)
        # Most questions contain a condition on the flip's columns alone, and this check suffices.
        if alike is not None and not alike.filter(pk=pk).exists():
            effect = FlipEffect.EVERY_ROW_LEAVES
        else:
            effect = (
                FlipEffect.STILL_PENDING
                if question.still_pending([pk]).exists()
                else FlipEffect.THIS_ROW_LEFT
            )
        transaction.set_rollback(True, using=question.using)
    return effect


def _is_constant(value: Any) -> bool:
    """Return whether a flip writes the same to every row; callables are assumed to do so."""
    return not hasattr(value, "resolve_expression") or type(value) in {Value, Now, DatabaseNow}


def still_pending(
    processor: Definition[Any], option: str, pk: Any, values: Values | None = None
) -> str:
    """Return the message for a row that a flip leaves pending, found before its handler ran."""
    written = dict(getattr(processor, option) if values is None else values)
    return (
        f"{processor.name}: expected {option}={written!r} to take a row out of pending, got row "
        f"{pk} still pending after it, so its handler was not called; make {option} change a "
        f"column that pending tests."
    )
