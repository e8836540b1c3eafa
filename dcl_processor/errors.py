"""Texts and tracebacks of exceptions, whose own methods may raise."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dcl_processor.interrupts import ends_the_run


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
    except BaseException as raised:  # an error's own methods are arbitrary code
        if ends_the_run(raised):
            raise
        return None


def traceback_text(error: BaseException) -> str:
    """Return the traceback as text."""
    return formatted(error) or replacement(error)


def replacement(error: BaseException) -> str:
    """Return a traceback as text for an error that makes Python's formatting fail."""
    return _frames(error) + describe(error) + "\n"


def formatted(error: BaseException) -> str | None:
    """Return the traceback as Python formats it, or ``None`` if the error makes that fail."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # as above
        return None


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


def _frames(error: BaseException) -> str:
    found = _own(error, "__traceback__")
    try:
        return "".join(traceback.format_tb(found))
    except Exception:  # noqa: BLE001  # a module's loader may raise when it is asked for a line
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(found)]
        return "".join(
            f'  File "{code.co_filename}", line {line}, in {code.co_name}\n'
            for code, line in places
        )


def _own(error: BaseException, name: str) -> Any:
    """Return the attribute that Python itself keeps, even if the error's class overrides it."""
    return vars(BaseException)[name].__get__(error)
