"""Texts of exceptions, whose own methods may raise, masked; and which of them interrupt a run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

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
    """Return the last lines of a traceback for people; each is masked, and cut off if it is long.

    They have the error that was raised.
    """
    found, room = list[str](), LONGEST_TRACEBACK
    for line in reversed(text.splitlines()):
        each = _cut_off(escaped(masked(line)), LONGEST_TEXT)
        room -= len(each) + 1
        if room <= len(_LEFT_OUT):
            found.append(_LEFT_OUT)
            break
        found.append(each)
    return "\n".join(reversed(found)) + "\n" * text.endswith("\n")


#: Stands in a traceback for the lines that are left out.
_LEFT_OUT = "  …"


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
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


# --- errors that interrupt the worker, and so are no row's failure


class HandlerCancelled(KeyboardInterrupt):
    """Raised in a plain handler at its ``handler_timeout``, as asyncio cancels a coroutine.

    As Ctrl-C does, it passes code that goes on after errors, lets the driver cancel a statement
    that it waits for, and ends a run that the handler has started.
    """


def ends_the_run(error: BaseException) -> bool:
    """Return whether the error interrupts the worker, and so is no row's failure.

    These are Ctrl-C; ``sys.exit()`` in a signal handler; and Celery's soft time limit, an
    ``Exception`` that is matched by class name, so that Celery need not be installed. A task group
    puts them in a group.
    """
    parts = [error]
    for each in parts:  # which grows meanwhile
        if isinstance(each, BaseExceptionGroup):
            parts += each.exceptions
    return any(map(_interrupts, parts))


def raise_interrupt(error: BaseException) -> None:
    """Raise the error again if it interrupts the worker."""
    if ends_the_run(error):
        raise error


def _interrupts(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, SystemExit):
        frames = traceback.walk_tb(error.__traceback__)
        return any(_handles_signal(frame) for frame, _ in frames)
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return ("billiard.exceptions", "SoftTimeLimitExceeded") in kinds


def _handles_signal(frame: FrameType) -> bool:
    """Recognise a signal handler by its argument, the frame that it interrupts, its caller's.

    ``signal.getsignal()`` would not work, because many handlers uninstall themselves first.
    """
    for value in frame.f_locals.values():
        given = value if type(value) is tuple else (value,)
        if any(each is frame.f_back and isinstance(each, FrameType) for each in given):
            return True
    return False
