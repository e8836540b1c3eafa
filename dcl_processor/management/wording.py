"""How the command writes answers for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dcl_processor.operator.times import span, utc_text
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer, Moment
    from dcl_processor.insights.locks import Holder, Locked

#: What people call the answers about a processor.
LABELS = {
    "pending": "pending",
    "due": "due now",
    "later": "due later",
    "oldest": "oldest pending",
    "in_progress": "in progress",
    "in_doubt": "in doubt",
    "given_up": "given up",
}

#: The parts of the question why a row is handled, as they are shown.
PARTS = {
    "pending": "in pending",
    "due": "its time has come",
    "attempts_left": "attempts left",
    "lease_free": "not leased",
    "unclaimed": "not claimed",
    "key_free": "its group is free",
    "given_up": "given up",
}


def answer(found: Answer[Any]) -> str:
    """Write a number of rows or a time, or why it is not known."""
    return moment(found) if hasattr(found.value, "at") else number(found) or "none"


def number(answer: Answer[int]) -> str:
    """Write a number of rows, or why it is not known; empty: there is none."""
    if answer.how == "more than":
        return f"more than {answer.value:,}"
    return answer.missing if answer.value is None else f"{answer.value:,}"


def short(answer: Answer[int]) -> str:
    """Write a number of rows for a narrow column."""
    if answer.value is None:
        return "?"
    return f"{answer.value}+" if answer.how == "more than" else str(answer.value)


def age(answer: Answer[Moment]) -> str:
    """Write an age for a narrow column."""
    if answer.how == "unknown":
        return "?"
    return "-" if answer.value is None else span(answer.value.seconds)


def moment(answer: Answer[Moment]) -> str:
    """Write a time, and how far away it is; empty: there is none."""
    if answer.value is None:
        return answer.missing
    seconds = answer.value.seconds
    away = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
    return f"{utc_text(answer.value.at)} ({away})"


def labelled(label: str, width: int, *texts: str) -> Iterator[str]:
    """Yield lines, the first of them behind a label."""
    for place, text in enumerate(texts):
        yield f"  {label if place == 0 else '':<{width}} {text}"


def rows(number: int, keys: str = "") -> str:
    """Write a number of rows, and the first of their keys."""
    said = "1 row" if number == 1 else f"{number:,} rows"
    return f"{said} ({keys})" if keys else said


def action(number: int, keys: str, values: str, reason: str, error: str) -> str:
    """Write what an operator has done to rows; ``error``: what ended it, if anything did."""
    details = {"values": values, "reason": reason, "ended by": error}
    said = "".join(f"; {name}: {printable(text)}" for name, text in details.items() if text)
    return f"{rows(number, printable(keys))}{said}"


def locked(answer: Answer[Locked]) -> list[str]:
    """Write how many rows each session holds, or why it is not known; empty: no session does."""
    if answer.value is None:
        return [answer.missing]
    held = [f"{each.rows:,} by {holder(each)}" for each in answer.value.holders if each.rows]
    return held or [*filter(None, [answer.why])]


def holder(holder: Holder) -> str:
    """Write a session that holds a lock."""
    if holder.prepared is not None:
        return f"the prepared transaction {holder.prepared!r}"
    if holder.pid is None:
        return "a session that PostgreSQL does not name"
    known: list[Any] = [
        holder.application_name,
        holder.role and f"role {holder.role}",
        holder.client,
        holder.since and f"since {utc_text(holder.since)}",
        holder.state,
        holder.query,
    ]
    words = ", ".join([f"pid {holder.pid}", *filter(None, known)])
    if holder.hidden:
        words += (
            f" ({', '.join(holder.hidden)}: not visible to this role; GRANT pg_read_all_stats TO "
            "it)"
        )
    return words if holder.blocks else f"{words} (a lock that keeps no worker from the row)"
