"""Compare what a block shows with what came."""

from __future__ import annotations

import doctest
import re

# A run's duration, and how workers shared the rows and met each other, differ each time.
_SECONDS = re.compile(r"\b\d+\.\d+ s\b")
_SHARE = re.compile(r"\b[1-9]\d* processed(, \d+ (stale|skipped))*(?= in 0.00 s \(worker \d+\))")
_STALE = re.compile(r"\b[1-9]\d* stale\b")
# Each worker prints its report when it ends, so that they come in any order.
_REPORTS = re.compile(r"(?:^.* in 0\.00 s \(worker \d+\)\n?)+", re.MULTILINE)


class Checker(doctest.OutputChecker):
    """Doctest's own comparison, with all durations equal and ``...`` for any text.

    A page may break a long line at a space, so that the block fits its column.
    """

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Tell whether the output is what the page shows."""
        flags = optionflags | doctest.ELLIPSIS
        return super().check_output(unbroken(plain(want)), unbroken(plain(got)), flags)


def unbroken(text: str) -> str:
    """Make a line break equal to a space; other spaces, as in a table, have to be the same."""
    return text.replace("\n", " ")


def plain(text: str) -> str:
    """Make outputs of two runs comparable; a worker that got no row still differs from others."""
    text = _STALE.sub("n stale", _SECONDS.sub("0.00 s", text))
    text = _SHARE.sub("n processed", text)
    return _REPORTS.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text)


def difference(want: str, got: str) -> str | None:
    """Say how the output differs from what the page shows, or None when it does not."""
    if Checker().check_output(want, got, 0):
        return None
    return f"the page shows:\n{want}\nbut the output is:\n{got}"
