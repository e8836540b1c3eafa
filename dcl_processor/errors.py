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
    """Return the traceback as text, without lines of the source if the error makes that fail."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # as above; so may the loader of a module, asked for a line
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(frames_of(error))]
        shown = [
            f'  File "{code.co_filename}", line {line}, in {code.co_name}\n'
            for code, line in places
        ]
        return f"{''.join(shown)}{describe(error)}\n"


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
