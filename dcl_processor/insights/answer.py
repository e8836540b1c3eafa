"""Answers: a number that could not be found out is not 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from django.db import connections

from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.states import NotRecordedError, question_of
from dcl_processor.operator.times import reading, utc
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question
from dcl_processor.sql.errors import is_connected, is_database_error, is_statement_timeout

T = TypeVar("T")

#: Seconds that each question may take.
TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in UTC; ``seconds``: how long ago, by the database's clock; below 0: still to come."""

    at: datetime
    seconds: float

    @classmethod
    def of(cls, at: datetime | None, now: datetime) -> Moment | None:
        """Return the moment of a column's value; ``now``: read with it, from the same database."""
        if at is None:
            return None
        return cls(utc(at), round((utc(now) - utc(at)).total_seconds(), 3))


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A value, and how it was found; ``why``: the reason if there is none.

    "exact": read, or true by definition. "more than": only so many rows were looked at. "unknown":
    it could not be found out. "not recorded": nothing in the database shows it.
    """

    value: T | None
    how: Literal["exact", "more than", "unknown", "not recorded"] = "exact"
    why: str = ""

    @property
    def missing(self) -> str:
        """Why there is no value, for people; empty: it is known that there is none, or which."""
        words = {"unknown": "could not be found out", "not recorded": "not recorded"}
        return f"{words[self.how]}: {self.why}" if self.how in words else ""

    @property
    def least(self) -> float:
        """The number of rows, or of seconds, that the answer shows at least; 0: there is none."""
        value: Any = self.value
        if isinstance(value, Moment):
            return value.seconds
        return float(value or 0) + (self.how == "more than")

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        document: dict[str, Any] = {"value": document_of(self.value), "how": self.how}
        if isinstance(self.value, Moment):
            document["seconds"] = self.value.seconds
        return {**document, "why": self.why} if self.why else document


def document_of(value: Any) -> Any:
    """Return a value as JSON has it."""
    match value:
        case Moment():
            return value.at.isoformat()
        case datetime():
            return utc(value).isoformat()
        case tuple():
            return [document_of(each) for each in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


class Asker:
    """Asks about one processor: each question with a time limit of its own.

    ``seconds``: the limit. A database that cannot be reached is not tried again; ``down``: such
    databases, with the reasons, which the askers of one command may share.
    """

    def __init__(
        self,
        processor: Definition[Any],
        using: str | None = None,
        seconds: float = TIMEOUT,
        down: dict[str, str] | None = None,
    ) -> None:
        self._processor, self._seconds = processor, seconds
        self._down = {} if down is None else down
        self._question: Question[Any] | None = None
        self.using, self._why = using or processor.using, ""
        try:
            self._question = question_of(processor, using)
            self.using = self._question.using
        except Exception as error:  # noqa: BLE001  # the reason is the answer
            self._why = explain(error, processor, using)

    def ask(self, read: Callable[[Question[Any]], Answer[T]]) -> Answer[T]:
        """Return the answer; no error is raised, whatever the database or the user's code does."""
        question = self._question
        if question is None:
            return Answer(None, "unknown", self._why)
        return self.look(question.using, lambda: read(question))

    def look(self, using: str, read: Callable[[], Answer[T]]) -> Answer[T]:
        """Return an answer of this database, as ``ask()`` does."""
        try:
            if using not in self._down:
                connect(using)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._down[using] = explain(error, self._processor, using)
        if using in self._down:
            return Answer(None, "unknown", self._down[using])
        try:
            with reading(using, self._seconds):
                return read()
        except NotRecordedError as error:
            return Answer(None, "not recorded", str(error))
        except Exception as error:  # noqa: BLE001  # the other questions can still be answered
            if is_database_error(error) and is_statement_timeout(error):
                return Answer(None, "unknown", f"not within {self._seconds:g} s")
            return Answer(None, "unknown", explain(error, self._processor, using))


def connect(using: str) -> None:
    """Open the connection again if it was lost; raises the driver's error."""
    is_connected(using)
    connections[using].ensure_connection()
