"""What an operator confirms: the rows as they were seen, signed, so that no others are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.core import signing
from django.core.exceptions import ValidationError

from dcl_processor import steady as time
from dcl_processor.diagnosis import one_line
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_of, key_text
from dcl_processor.management.acting import CHANGED, LOCKED, Action
from dcl_processor.masking import shown
from dcl_processor.operator_writes import Written
from dcl_processor.processor import BatchProcessor

from .choosing import ACTIONS, BUDGET, Wanted, chunks, options

#: Seconds for which a confirmation can be used.
MAX_AGE = 3600

#: Seconds that a chunk waits for rows that other sessions have locked.
PATIENCE = 1.0

#: Seconds after which a request tries no other row, also within a chunk: gunicorn ends a request
#: after 30.
LONGEST = 20.0

#: Reasons for which rows were left that are kept.
MOST_REASONS = 20


class InvalidPlan(Exception):
    """A confirmation that was not made by this page for this user, or is too old."""


@dataclass(slots=True)
class Plan:
    """The rows that an action is still to be applied to, and what has been done so far.

    ``rows``: their keys, each with the digest of the row's marks as it was shown; ``total``: the
    rows that were confirmed; ``done``: those written to; ``left``: how many were left as they are,
    by reason.
    """

    name: str
    action: str
    wanted: Wanted
    rows: dict[Any, str]
    total: int
    done: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def signed(self, user: Any) -> str:
        """Return the plan as a text that only this user can send back."""
        document = {
            "name": self.name,
            "action": self.action,
            "wanted": [self.wanted.state, self.wanted.kind],
            "rows": [[key_text(pk), digest] for pk, digest in self.rows.items()],
            "total": self.total,
            "done": self.done,
            "left": self.left,
        }
        return signing.dumps(document, salt=_salt(user), compress=True)

    @classmethod
    def from_text(cls, text: str, processor: BatchProcessor[Any], user: Any) -> Plan:
        """Return the plan of a text; raises ``InvalidPlan``."""
        try:
            document = signing.loads(text, salt=_salt(user), max_age=MAX_AGE)
            if document["name"] != processor.name:
                raise InvalidPlan
            model = rows.question_of(processor, None).model
            return cls(
                document["name"],
                document["action"],
                Wanted(*document["wanted"]),
                {key_of(model, pk): digest for pk, digest in document["rows"]},
                document["total"],
                document["done"],
                document["left"],
            )
        except (signing.BadSignature, ValidationError, KeyError, TypeError, ValueError) as error:
            raise InvalidPlan from error

    @property
    def act(self) -> Action:
        return ACTIONS[self.action]

    def apply(
        self,
        processor: BatchProcessor[Any],
        *,
        values: dict[str, Any] | None = None,
        reason: str = "",
        written: list[Any],
    ) -> None:
        """Write to the rows, chunk by chunk, until the time of a request is used up.

        ``written``: gets the keys of the rows whose write is committed, also before an error.
        """
        begun, table = time.monotonic(), rows.question_of(processor, None).table
        for some in [*chunks([*self.rows])]:
            seen = {pk: self.rows[pk] for pk in some}
            write = self.act.prepare(processor, table.filter(pk__in=some), options(values, reason))
            done = Written()
            try:
                write.to_free(seen, done, seconds=PATIENCE, stop_at=begun + LONGEST)
            finally:
                # Also before an error, or the next try would find the rows changed by this one.
                written += done.written
                self._note(done)
            if time.monotonic() > begun + BUDGET:
                return

    def _note(self, done: Written) -> None:
        """Count the rows by what became of them; those that were not tried stay in the plan."""
        self.done += len(done.written)
        self._forget(done.written)
        self._leave(CHANGED, done.changed)
        self._leave(LOCKED, done.locked)
        for pk, error in done.failed.items():
            self._leave(f"the database reported: {shown(one_line(error), 300)}", [pk])

    def _leave(self, why: str, pks: list[Any]) -> None:
        known = why in self.left or len(self.left) < MOST_REASONS
        said = why if known else "other reasons"
        if pks:
            self.left[said] = self.left.get(said, 0) + len(pks)
        self._forget(pks)

    def _forget(self, pks: Iterable[Any]) -> None:
        for pk in pks:
            self.rows.pop(pk, None)


def _salt(user: Any) -> str:
    return f"dcl_processor.admin_page.plan.{user.pk}"
