"""Texts of exceptions, whose own methods may raise; secrets in them are masked."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from dcl_processor.report.interrupts import raise_interrupt

MASK = "***"

#: Characters of a text that are looked at: an error may be a whole response of a server.
LONGEST = 20_000

#: Characters of a text, and of a traceback, that are shown and kept.
LONGEST_TEXT, LONGEST_TRACEBACK = 2_000, 20_000

_SECRETS = (
    # scheme://user:password@host, also without its end if the text is cut off; not host:port.
    re.compile(r"(://[^\s:/@]{0,200}:)(?!\d{1,5}(?:[/\s,;)'\"]|$))(\S*)"),
    re.compile(
        r"((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key)[\"']?\s*[=:]\s*)"
        r"(?:\"[^\"]*\"?|'[^']*'?|[^\s,;&)}\]]+)",
        re.IGNORECASE,
    ),
    re.compile(r"(authorization[\"']?\s*[=:]\s*[\"']?(?:\w+\s+)?)[^\s,;\"'}]+", re.IGNORECASE),
    re.compile(r"(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE),
)


def masked(text: str) -> str:
    """Return the first characters of the text, with what looks like a secret replaced by stars.

    A guess by the form of the text: credentials in a URL, ``password=…`` and its kin, and the
    header ``Authorization``.
    """
    text = text[:LONGEST]
    url, *others = _SECRETS
    text = url.sub(_without_password, text)
    for secret in others:
        text = secret.sub(lambda found: found[1] + MASK, text)
    return text


def shown(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text of an error for people: masked, in one line, and with so many characters."""
    return _cut_off(printable(masked(text)), longest)


def described(error: BaseException) -> str:
    """Return the error's text for people, as ``shown()`` does."""
    return shown(describe(error))


def shown_traceback(text: str) -> str:
    """Return a traceback for people: each line is masked, and the middle of a long one is left out.

    The first lines have the frames of the first error, the last ones the error that was raised.
    """
    lines = text.splitlines()
    half = LONGEST_TRACEBACK // 2 - len(_LEFT_OUT)
    first = _fitting(lines, half)
    last = _fitting(reversed(lines[len(first) :]), half)[::-1]
    left_out = [_LEFT_OUT] if len(first) + len(last) < len(lines) else []
    end = "\n" if text.endswith("\n") else ""
    return "\n".join([*first, *left_out, *last]) + end


#: Stands in a traceback for the lines that are left out.
_LEFT_OUT = "  …"


def _fitting(lines: Iterable[str], most: int) -> list[str]:
    """Return the first lines, each masked and capped, that have so many characters together."""
    found = list[str]()
    for line in lines:
        each = _cut_off(escaped(masked(line)), LONGEST_TEXT)
        most -= len(each) + 1
        if most < 0:
            break
        found.append(each)
    return found


def _cut_off(line: str, longest: int) -> str:
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _without_password(found: re.Match[str]) -> str:
    """Return ``://user:***`` and what comes after the last @ of the word."""
    _, at, rest = found[2].rpartition("@")
    if at:
        return f"{found[1]}{MASK}@{rest}"
    is_cut_off = found.end() == len(found.string)
    return found[1] + MASK if is_cut_off and found[2] else found[0]


def describe(error: BaseException) -> str:
    """Return the error's text, or a replacement if it is empty or ``str()`` raises."""
    return text(error) or represent(error)


def text(error: BaseException) -> str:
    """Return the error's text, which may be empty, or a replacement if ``str()`` raises."""
    said = _said(str, error)
    return represent(error) if said is None else said


def printable(text: str) -> str:
    """Return the text in one line, with its control characters escaped.

    An error may quote text from strangers, which must not forge a log line or control a terminal.
    """
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """Return the text with its control characters escaped, line breaks among them."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def represent(error: BaseException) -> str:
    """Return ``repr(error)``, or the name of its class if ``repr()`` raises."""
    return _said(repr, error) or f"<{type(error).__name__}>"


def _said(ask: Callable[[BaseException], str], error: BaseException) -> str | None:
    try:
        return ask(error)
    except BaseException as raised:  # noqa: BLE001  # an error's own methods are arbitrary code
        raise_interrupt(raised)
        return None


def traceback_text(error: BaseException) -> str:
    """Return the traceback as text, or the error's text alone if it makes that fail."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # as above; so may the loader of a module, asked for a line
        return f"{describe(error)}\n"


def frames_of(error: BaseException) -> Any:
    """Return the error's traceback, even if its class overrides the attribute."""
    return _own(error, "__traceback__")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if the error allows it and has no such note yet."""
    with suppress(Exception):  # a frozen dataclass, for instance
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def forget_frames(error: BaseException) -> None:
    """Release the tracebacks of an error and of the errors behind it.

    A traceback keeps the variables of every frame it went through: rows, and what the handler had
    loaded. (Clearing the frames instead would close the generators and coroutines among them, such
    as the caller's event loop.)
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        # Not "each.__traceback__ = None": an error's class may refuse to have its attributes set.
        BaseException.with_traceback(each, None)
        waiting += [_own(each, "__cause__"), _own(each, "__context__")]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _own(error: BaseException, name: str) -> Any:
    """Return the attribute that Python itself keeps, even if the error's class overrides it."""
    return vars(BaseException)[name].__get__(error)
