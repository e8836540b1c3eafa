"""The rows of a processor, by their condition or by their key: what counts, shows and acts alike.

A function returns ``None`` where no row can be in that condition, and raises ``NotRecordedError``
where rows may be, but no column shows it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Substr

from dcl_processor.backlog import question_of
from dcl_processor.candidates.question import Question
from dcl_processor.clock import DatabaseNow
from dcl_processor.definition.kinds import rules_of
from dcl_processor.errors import printable
from dcl_processor.masking import masked, shown
from dcl_processor.operator_states import NotRecordedError, Rows, given_up, has_attempts_left
from dcl_processor.processor import BatchProcessor
from dcl_processor.values import as_timedelta

from .answer import Answer, How

__all__ = ["NotRecordedError", "Rows", "given_up", "question_of"]


def due(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the pending rows that a run would try now, if no session has them locked."""
    return question.queryset.filter(processor._due(question.model) or Q())


def later(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the pending rows whose next attempt is still to come."""
    at = processor.retry.next_attempt_at if processor.retry else None
    return None if at is None else question.queryset.filter(**{f"{at}__gt": DatabaseNow()})


def waiting(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the pending rows, but not those that show that they have no attempts left."""
    return question.queryset.filter(has_attempts_left(processor, question) or Q())


def in_progress(
    processor: BatchProcessor[Any], question: Question[Any], doubt_after: float
) -> Rows:
    """Return the rows that have a lease, or a claim that is not in doubt yet."""
    if processor.lease is not None:
        return processor.in_progress().using(question.using)
    if processor.claim is not None and processor.claimed_at is not None:
        young = {f"{processor.claimed_at}__gt": DatabaseNow() - as_timedelta(doubt_after)}
        return processor.in_progress().using(question.using).filter(**young)
    if rules_of(processor).in_transaction:
        raise NotRecordedError(f"a {_name(processor)} worker only locks its row")
    raise NotRecordedError("set claim=… and claimed_at=…")


def in_doubt(processor: BatchProcessor[Any], question: Question[Any], doubt_after: float) -> Rows:
    """Return the rows whose claim is older than ``doubt_after`` seconds, and was never settled."""
    if processor.lease is not None or not rules_of(processor).marked_by:
        return None
    if processor.claim is None or processor.claimed_at is None:
        raise NotRecordedError("set claim=… and claimed_at=…")
    return processor.in_doubt(older_than=doubt_after).using(question.using)


def with_error(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the rows whose ``last_error`` has a text."""
    column = processor.retry.last_error if processor.retry else None
    if column is None:
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the last error")
    return question.table.filter(**{f"{column}__gt": ""})


def _name(processor: BatchProcessor[Any]) -> str:
    return str(processor.delivery).upper()


# --- primary keys as operators write and read them; the columns of a composite one have commas


def key_of(model: type[Model], text: str) -> Any:
    """Return the primary key that the text names; columns of a composite key are joined by commas.

    A comma or a backslash in such a column follows a backslash, as ``key_text()`` writes it.
    Raises ``ValidationError`` or ``ValueError`` for a text that is no key.
    """
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _parsed(fields[0], text)
    texts = _split(text)
    if len(texts) != len(fields):
        raise ValueError(f"expected {len(fields)} values joined by commas, got {text!r}")
    return tuple(_parsed(each, part) for each, part in zip(fields, texts, strict=True))


def _parsed(field: Any, text: str) -> Any:
    while field.remote_field:
        field = field.target_field
    try:
        return field.to_python(text)  # spaces may be a part of a text
    except (ValidationError, ValueError):
        return field.to_python(text.strip())


def key_text(pk: Any) -> str:
    """Return a primary key as ``key_of()`` reads it."""
    if not isinstance(pk, tuple):
        return str(pk)
    return ",".join(re.sub(r"([\\,])", r"\\\1", str(each)) for each in pk)


def _split(text: str) -> list[str]:
    parts = [""]
    for escaped, comma, other in re.findall(r"\\([\\,])|(,)|(.)", text, re.DOTALL):
        if comma:
            parts.append("")
        parts[-1] += escaped or other
    return parts


# --- rows that were given up on, by the class of their error


#: Characters of an error that are read, and those of the name of its class.
LONGEST_TEXT, LONGEST_KIND = 300, 100

#: Classes of errors that are shown.
MOST_KINDS = 20


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Rows that were given up on after errors of one class; ``example``: that of the row ``pk``.

    ``kind``: empty for rows without an error; ``is_exact``: whether ``of_kind()`` finds the rows,
    whose texts begin with ``kind`` as it is shown, masked.
    """

    kind: str
    rows: int
    example: str
    pk: Any
    is_exact: bool = True

    @property
    def key(self) -> str:
        """The key of the row as an operator types it."""
        return key_text(self.pk)

    def as_dict(self) -> dict[str, Any]:
        """Return the group for JSON."""
        return {"kind": self.kind, "rows": self.rows, "example": self.example, "pk": self.key}


def failures(
    processor: BatchProcessor[Any], question: Question[Any], *, most: int
) -> Answer[tuple[FailureGroup, ...]]:
    """Return the rows that were given up on, by class of error; ``most``: rows that are read."""
    column = error_column(processor)
    try:
        found = given_up(processor, question)
    except NotRecordedError as error:
        return Answer.not_recorded(str(error))
    if found is None:
        return Answer(())
    if column is None:
        return Answer.not_recorded("set retry=Retry(…) with last_error, which stores the error")
    return by_kind(found.order_by("pk"), column, most=most)


def by_kind(
    found: QuerySet[Any, Any], column: str, *, most: int
) -> Answer[tuple[FailureGroup, ...]]:
    """Return the rows by the class of the error in this column; ``most``: rows that are read."""
    texts = found.annotate(dcl_error=Substr(column, 1, LONGEST_TEXT))
    read = list(texts.values_list("pk", "dcl_error")[: most + 1])
    numbers: Counter[str] = Counter()
    first: dict[str, FailureGroup] = {}
    for pk, text in ((pk, text or "") for pk, text in read[:most]):
        kind = kind_of(text)
        numbers[kind] += 1
        is_exact = text.startswith(kind)
        first.setdefault(kind, FailureGroup(kind, 0, shown(text, LONGEST_TEXT), pk, is_exact))
    groups = tuple(
        replace(first[kind], rows=number) for kind, number in numbers.most_common(MOST_KINDS)
    )
    is_part = len(read) > most or len(numbers) > MOST_KINDS
    return Answer(groups, How.MORE_THAN if is_part else How.EXACT)


def kind_of(text: str) -> str:
    """Return the class of an error as ``Retry`` writes it, or the text's beginning, masked."""
    return printable(masked(text).partition(":")[0])[:LONGEST_KIND]


def given_up_for(
    processor: BatchProcessor[Any], question: Question[Any], kind: str | None
) -> QuerySet[Any, Any]:
    """Return the rows that were given up on after an error of this class; ``None``: after any."""
    found = given_up(processor, question)
    found = question.table.none() if found is None else found
    return found if kind is None else of_kind(processor, found, kind)


def of_kind(
    processor: BatchProcessor[Any], found: QuerySet[Any, Any], kind: str
) -> QuerySet[Any, Any]:
    """Return those of the rows whose error is of this class."""
    column = error_column(processor)
    if column is None:  # without rows it would look like good news
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the error")
    if not kind:
        return found.filter(Q(**{column: ""}) | Q(**{f"{column}__isnull": True}))
    if len(kind) == LONGEST_KIND:
        return found.filter(**{f"{column}__startswith": kind})
    return found.filter(Q(**{f"{column}__startswith": f"{kind}:"}) | Q(**{column: kind}))


def error_column(processor: BatchProcessor[Any]) -> str | None:
    """Return the column of the last error, if there is one."""
    return processor.retry.last_error if processor.retry else None
