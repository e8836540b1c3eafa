"""Masks passwords and tokens in texts of errors, which may quote a connection string.

The text of an error that is shown or kept comes from here: masked, in one line, and capped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import describe, escaped, printable

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
