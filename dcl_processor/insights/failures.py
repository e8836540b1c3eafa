"""Rows that were given up on, by the class of their error."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Q, QuerySet
from django.db.models.functions import Substr

from dcl_processor.candidates.question import Question
from dcl_processor.errors import printable
from dcl_processor.masking import masked, shown
from dcl_processor.processor import BatchProcessor

from . import rows
from .answer import Answer, How
from .rows import key_text

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
        found = rows.given_up(processor, question)
    except rows.NotRecordedError as error:
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


def of_kind(
    processor: BatchProcessor[Any], found: QuerySet[Any, Any], kind: str
) -> QuerySet[Any, Any]:
    """Return those of the rows whose error is of this class."""
    column = error_column(processor)
    if column is None:
        return found.none()
    if not kind:
        return found.filter(Q(**{column: ""}) | Q(**{f"{column}__isnull": True}))
    if len(kind) == LONGEST_KIND:
        return found.filter(**{f"{column}__startswith": kind})
    return found.filter(Q(**{f"{column}__startswith": f"{kind}:"}) | Q(**{column: kind}))


def error_column(processor: BatchProcessor[Any]) -> str | None:
    """Return the column of the last error, if there is one."""
    return processor.retry.last_error if processor.retry else None
