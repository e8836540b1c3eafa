"""What the command prints: answers and reports to stdout, failures to stderr.

Without a terminal, a run with nothing to do prints nothing, because cron mails any output. What
came from rows is in one line, and escaped.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from textwrap import indent
from typing import TYPE_CHECKING, Any

from django.core.management.base import OutputWrapper

from dcl_processor.insights.answer import Answer, document_of
from dcl_processor.insights.explanation import Explanation
from dcl_processor.insights.rows import Listed, Row, key_text
from dcl_processor.insights.status import Status
from dcl_processor.operator.diagnosis import describe
from dcl_processor.operator.times import span, utc_text
from dcl_processor.options import worker
from dcl_processor.report.errors import escaped, printable
from dcl_processor.report.report import Report

if TYPE_CHECKING:
    from dcl_processor.ledger import Record, State

#: Keys that a line about rows names, and characters of a column's value.
SHOWN, LONGEST = 10, 500

#: What people call the answers about a processor, and the states that a row may be in.
LABELS = {
    "pending": "pending",
    "due": "due now",
    "held": "held by its key",
    "later": "due later",
    "oldest": "oldest pending",
    "in_progress": "in progress",
    "in_doubt": "in doubt",
    "given_up": "given up",
    "rate": "rows a second",
    "time_left": "time left",
}

#: The answers that are shown only if there is something to show.
RARE = ("held", "rate", "time_left")

#: The columns of the tables: the names of answers, and their heads.
OF_LIST = {"pending": "pending", "oldest": "oldest", "time_left": "left"}
OF_STATUS = {
    "pending": "pending",
    "oldest": "oldest",
    "in_progress": "in progress",
    "in_doubt": "in doubt",
    "given_up": "given up",
    "rate": "rows/s",
    "time_left": "left",
}


class Output:
    """The streams of one command; what a run of one of several workers writes has its number.

    ``as_json``: stdout gets only JSON.
    """

    def __init__(self, stdout: OutputWrapper, stderr: OutputWrapper, *, as_json: bool) -> None:
        self.stdout, self.stderr, self.as_json = stdout, stderr, as_json

    def answer(self, document: Any, lines: Iterable[str]) -> None:
        """Write the answer to a question: as JSON, or as lines."""
        self.lines([json.dumps(document)] if self.as_json else lines)

    def report(self, report: Report, trouble: str = "") -> None:
        """Write what a run did, and failed rows; ``trouble``: why it did not complete."""
        for failure in report.failures:
            row = f"row {printable(str(failure.pk))} failed{failure.attempts}"
            self.error(f"{report.name}: {row}: {describe(failure.error)}")
        document = report.as_dict()
        if trouble:
            self.trouble(report.name, trouble)
            document.update(ok=False, error=trouble)
        if worker.number:
            document["worker"] = worker.number
        if self.as_json:
            self.lines([json.dumps(document)])
        elif report.did_something or (self.stdout.isatty() and not trouble):
            self.lines([f"{report}{_by()}"])

    def trouble(self, name: str, why: str) -> None:
        """Write why a run did not complete."""
        self.error(f"{name}: {why}{_by()}")

    def error(self, line: str) -> None:
        """Write a line to stderr."""
        _write(self.stderr, line)

    def lines(self, texts: Iterable[str]) -> None:
        """Write lines to stdout."""
        for text in texts:
            _write(self.stdout, text)


def _write(stream: OutputWrapper, text: str) -> None:
    stream.write(text)
    stream.flush()  # a reader of a pipe gets each line when it is written


def _by() -> str:
    return f" (worker {worker.number})" if worker.number else ""


# --- processors


def answer(found: Answer[Any], name: str = "") -> str:
    """Write a number, a time or a duration, or why it is not known."""
    value = found.value
    if value is None:
        return found.missing or "none"
    more = "+" if found.how == "more than" else ""
    if hasattr(value, "at"):
        return f"{utc_text(value.at)} ({span(value.seconds)}{more} ago)"
    if name == "time_left":
        return span(value)
    return f"{value:,.1f}" if name == "rate" else f"{value:,}{more}"


def _cell(found: Answer[Any], name: str) -> str:
    """Write an answer for a narrow column: "?" is not known, "-" not recorded or none."""
    if found.value is None:
        return "?" if found.how == "unknown" else "-"
    if name == "oldest":
        return f"{span(found.value.seconds)}{'+' if found.how == 'more than' else ''}"
    return answer(found, name)


def table(
    found: Sequence[Status], columns: Mapping[str, str], about: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each processor below the head; ``about``: a text for some."""
    lines = [[*columns.values(), "state", "processor"]]
    lines += [
        [*(_cell(each.answers[name], name) for name in columns), each.state, each.name]
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *cells, state, name in lines:
        numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        text = about.get(name, "").partition("\n")[0]
        line = [*numbers, f"{state:<{widths[-2]}}", f"{name:<{widths[-1]}}", text]
        yield "  ".join(line).rstrip()


def status(found: Status) -> Iterator[str]:
    """Yield the lines about one processor."""
    yield f"{found.name} ({found.delivery}, database {found.using!r})"
    if found.kept_back:
        yield _labelled("not running", printable(found.kept_back))
    for name, label in LABELS.items():
        if found.answers[name].value or name not in RARE:
            yield _labelled(label, answer(found.answers[name], name))


def _labelled(label: str, text: str) -> str:
    return f"  {label:<15} {text}"


def standing(state: State) -> str:
    """Write whether a processor is paused."""
    return f"{state.name}: {printable(state.sentence) or 'not paused'}"


def record(found: Record) -> str:
    """Write what a run or an operator did."""
    tried = ""
    if found.action == "run":
        counts = [f"{number:,} {name}" for name, number in found.counts.items() if name != "stale"]
        end = found.stopped or f"no end recorded, seen {utc_text(found.seen_at)}"
        tried = f"{', '.join(counts) or 'nothing'}, {found.rate:.1f} rows/s, {end}"
    keys = f"{rows(found.rows)} ({found.keys})" if found.keys else ""
    said = together(keys, found.values, found.reason, tried, found.error)
    about = f"{utc_text(found.at)}  {found.processor}  {found.action} by {found.by}"
    return f"{about}: {said}" if said else about


# --- rows


def row(found: Row, key: str) -> Iterator[str]:
    """Yield the lines about a row; ``key``: as people read it."""
    yield f"{found.name}, row {key}: {printable(found.reason)}"
    for name, part in found.parts.items():
        yield _labelled(LABELS[name], "yes" if part else "no")
    for name, value in found.columns.items():
        yield _labelled(name, printable(str(document_of(value)))[:LONGEST] or "(empty)")
    holders = ", ".join(f"by {each}" for each in found.locked.value or ())
    yield _labelled("locked", holders or found.locked.missing or "no")


HEAD_OF_ROWS = f"{'key':<12} {'since':>7} {'attempts':>8}  error"


def listed(found: Listed) -> str:
    """Write a row in one line: its key, since when it is in its state, attempts and error."""
    age = "-" if found.since is None else span(abs(found.since.seconds))
    attempts = "-" if found.attempts is None else str(found.attempts)
    return f"{printable(found.key):<12} {age:>7} {attempts:>8}  {found.error}".rstrip()


def rows(number: int) -> str:
    """Write a number of rows."""
    return "1 row" if number == 1 else f"{number:,} rows"


def named(pks: Collection[Any]) -> str:
    """Write the number of rows, and the first of their keys."""
    return f"{rows(len(pks))} ({first_keys(pks)})" if pks else rows(0)


def first_keys(pks: Collection[Any]) -> str:
    """Write the first keys of rows, as ``--pk`` reads them."""
    some = [printable(key_text(pk)) for pk in islice(pks, SHOWN)]
    return ", ".join([*some, "…"] if len(pks) > SHOWN else some)


def together(*texts: str) -> str:
    """Write those of the texts that are not empty in one line."""
    return "; ".join(printable(text) for text in texts if text)


# --- the plan


def explanation(found: Explanation) -> Iterator[str]:
    """Yield the SQL, its plan, and the indexes for it."""
    model = found.model._meta.label
    yield f"{found.name}: {found.delivery}, {model} on {found.using!r}"
    parts = {"The lock-free read": [found.read], "The plan of the lock-free read": found.plan}
    if found.indexes:
        parts[f"Add to the Meta.indexes of {model}"] = [f"{each}," for each in found.code()]
    for title, texts in parts.items():
        yield f"\n{title}:"
        # A literal may be text from outside, and must not forge a line. Its blanks stay.
        yield from (indent(escaped(text), "    ") for text in texts)
