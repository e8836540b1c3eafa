"""The lines that the command prints as answers: what came from rows is in one line, and escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from textwrap import indent
from typing import TYPE_CHECKING, Any

from dcl_processor.operator.times import span, utc_text
from dcl_processor.report.errors import escaped, printable

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer
    from dcl_processor.insights.explanation import Explanation
    from dcl_processor.insights.rows import Listed, Row
    from dcl_processor.insights.status import Status
    from dcl_processor.processor import BatchProcessor

#: Keys that a line about rows names.
SHOWN = 10

#: What people call the answers about a processor.
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

#: The states that a row may be in.
PARTS = LABELS

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


# --- processors


def table(
    found: Sequence[Status], columns: Mapping[str, str], about: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each processor below the head; ``about``: a text for some names."""
    lines = [[*columns.values(), "state", "processor"]]
    lines += [
        [*(_cell(each.answers[name], name) for name in columns), each.state, each.name]
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *cells, state, name in lines:
        numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        line = [*numbers, f"{state:<{widths[-2]}}", f"{name:<{widths[-1]}}", about.get(name, "")]
        yield "  ".join(line).rstrip()


def first_lines(processors: Iterable[BatchProcessor[Any]]) -> dict[str, str]:
    """Return the first line of each processor's docstring by its name."""
    return {each.name: (each.__doc__ or "").strip().partition("\n")[0] for each in processors}


def status(found: Status) -> Iterator[str]:
    """Yield the lines about one processor."""
    yield f"{found.name} ({found.delivery}, database {found.using!r})"
    if found.kept_back:
        yield from _labelled("not running", 15, printable(found.kept_back))
    for name, label in LABELS.items():
        if name in RARE and not found.answers[name].value:
            continue
        yield from _labelled(label, 15, answer(found.answers[name], name))


def _labelled(label: str, width: int, *texts: str) -> Iterator[str]:
    for begin, text in zip_longest([label], texts, fillvalue=""):
        yield f"  {begin:<{width}} {text}"


# --- rows


def row(found: Row, key: str) -> Iterator[str]:
    """Yield the lines about a row."""
    from dcl_processor.insights.answer import document_of  # not for a run

    yield f"{found.name}, row {printable(key)}: {printable(found.reason)}"
    for name, part in found.parts.items():
        yield from _labelled(PARTS[name], 18, "yes" if part else "no")
    for name, value in found.columns.items():
        text = printable(str(document_of(value)))[:500] or "(empty)"
        yield from _labelled(name, 18, text)
    holders = [f"by {each}" for each in found.locked.value or ()]
    yield from _labelled("locked", 18, *(holders or [found.locked.missing or "no"]))


HEAD_OF_ROWS = f"{'key':<12} {'since':>7} {'attempts':>8}  error"


def listed(found: Listed) -> str:
    """Write a row in one line: its key, since when it is in its state, attempts and error."""
    since = found.since
    age = "-" if since is None else span(abs(since.seconds))
    attempts = "-" if found.attempts is None else str(found.attempts)
    return f"{printable(found.key):<12} {age:>7} {attempts:>8}  {found.error}".rstrip()


def rows(number: int, keys: str = "") -> str:
    """Write a number of rows, and the first of their keys."""
    said = "1 row" if number == 1 else f"{number:,} rows"
    return f"{said} ({keys})" if keys else said


def named(pks: Collection[Any]) -> str:
    """Return the number of rows, and the first of their keys."""
    return rows(len(pks), first_keys(pks))


def first_keys(pks: Collection[Any]) -> str:
    """Return the first keys of rows, as ``--pk`` reads them."""
    from dcl_processor.insights.rows import key_text  # not for a run

    some = ", ".join(printable(key_text(pk)) for pk in islice(pks, SHOWN))
    return f"{some}{', …' if len(pks) > SHOWN else ''}"


def acted(number: int, keys: str, *texts: str) -> str:
    """Write to which rows, if to some, an operator has done something; ``texts``: and how."""
    said = [rows(number, keys) if keys else "", *map(printable, texts)]
    return ": " + "; ".join(filter(None, said)) if any(said) else ""


# --- the plan


def explanation(found: Explanation) -> Iterator[str]:
    """Yield the SQL, its plan, and the indexes for it."""
    yield f"{found.name}: {found.delivery}, {found.model._meta.label} on {found.using!r}"
    yield from _part("The lock-free read:", found.read)
    yield from _part("The plan of the lock-free read:", *found.plan)
    if not found.indexes:
        return
    title = f"Add to the Meta.indexes of {found.model._meta.label}:"
    yield from _part(title, *(f"{each}," for each in found.code()))
    yield (
        "\nIn the migration that makemigrations writes, set atomic = False, and replace\n"
        "AddIndex by AddIndexConcurrently (django.contrib.postgres.operations), which\n"
        "does not block writes."
    )


def _part(title: str, *texts: str) -> Iterator[str]:
    yield f"\n{title}"
    # A literal may be text from outside, and must not forge a line. Its blanks stay as they are.
    yield from (indent(escaped(text), "    ") for text in texts)
