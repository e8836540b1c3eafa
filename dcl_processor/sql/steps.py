"""The values that the steps on a session take and give, and the errors of what they write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcl_processor.pending.question import Question
from dcl_processor.report.exceptions import InvalidPending, ProcessorError, StillPending
from dcl_processor.report.values import Values


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows that a claim may take: the first ``limit`` of them that are free.

    ``keys``: of rows that have some, those that they had when they were read.
    """

    pks: Sequence[Any]
    limit: int
    keys: Mapping[Any, Any] = field(default_factory=dict)

    def visited(self, got: Mapping[Any, Any]) -> Sequence[Any]:
        """Return the rows that a claim came to: those up to the last one that it got."""
        if len(got) < self.limit or self.choice is None:
            return self.pks
        return self.pks[: 1 + max(place for place, pk in enumerate(self.pks) if pk in got)]

    def only(self, pk: Any) -> Wanted:
        """Return one of the rows."""
        return Wanted([pk], 1, self.keys)

    def candidates(self) -> dict[Any, Any]:
        """Return the rows with their keys."""
        return {pk: self.keys.get(pk) for pk in self.pks}

    @property
    def choice(self) -> int | None:
        """How many of the named rows the claim takes; ``None``: all that are free."""
        return self.limit if self.limit < len(self.pks) else None


@dataclass(slots=True)
class Claimed:
    """What a claim got, in the order of the candidates: instances by their keys.

    ``locked``: the candidates that it could lock, and that are not pending any more unless they are
    among the rows. ``before`` and ``after``: of rows with a mark, the marked columns before and
    after the claim. Of rows with keys, ``ours``: those that are locked together with their keys;
    ``elsewhere``: those that other sessions have locked.
    """

    rows: dict[Any, Any]
    locked: Collection[Any] = ()
    before: Mapping[Any, Values] = field(default_factory=dict)
    after: Mapping[Any, Values] = field(default_factory=dict)
    ours: Collection[Any] = ()
    elsewhere: Collection[Any] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """What is written to some rows.

    ``asks``: the rows have to leave ``pending`` by it, or nothing is written. ``expected``: the
    columns by which a marked row is recognised as this worker's; a list: one of these values.
    """

    values: Values
    pks: Sequence[Any]
    asks: bool = False
    expected: Values = field(default_factory=dict)


def by_key(question: Question[Any], rows: Sequence[Any], pks: Sequence[Any]) -> dict[Any, Any]:
    """Return the rows by their keys, in the order of the candidates."""
    answers, query = dict[Any, Any](), question.queryset.query
    added = [*query.annotation_select, *query.extra_select]
    for row in rows:
        first = answers.setdefault(row.pk, row)
        if row is not first and [name for name in added if vars(row)[name] != vars(first)[name]]:
            raise InvalidPending(
                f"{question.model._meta.label}: expected pending to return each row once, got row "
                f"{row.pk} several times with different values of {added}; "
                "aggregate them, or compute them in a subquery."
            )
    return {pk: answers[pk] for pk in pks if pk in answers}


def not_written(label: str, pks: Sequence[Any]) -> ProcessorError:
    """Return the error for rows that exist and that an update has left out."""
    one = len(pks) == 1
    named = f"row {pks[0]}" if one else f"rows {', '.join(map(str, pks[:5]))} and others"
    got = "it not written although it exists" if one else "fewer written than exist"
    return ProcessorError(
        f"{label}: expected the update to write {named}, got {got}; look for a trigger, a rule or "
        "row-level security that drops the update."
    )


def not_marked(label: str, pk: Any, names: Sequence[str]) -> ProcessorError:
    """Return the error of a row that its claim leaves free for the next one."""
    return ProcessorError(
        f"{label}: expected the claim of row {pk} to keep other workers from it, got a row that is "
        f"as free as before, so its handler was not called; look for a trigger that keeps the old "
        f"value of {' or '.join(map(repr, names))}, or let pending test what claim changes."
    )


def not_left_pending(label: str, pk: Any) -> StillPending:
    """Return the error of a row that is still pending after it was handled."""
    error = StillPending(
        f"{label}: expected row {pk} to leave pending once it was handled, got a row that is still "
        "pending; make the handler or done change a column that pending tests."
    )
    error.pk = pk
    return error


def show(row: Any, values: Values) -> None:
    """Let the instance have the row's values, so that the handler's ``save()`` keeps them."""
    known = vars(row)
    known.update({name: value for name, value in values.items() if name in known})
