"""Findings about processors, which need no database: their columns, their router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from django.db import router

from dcl_processor.checks import sharing

from . import pauses
from .findings import Finding, Level, ok
from .statements import Asked

#: A lease is to be at least so many times as long as the slowest handler.
ENOUGH = 2


def routing(asked: Asked) -> Iterator[Finding]:
    """Find whether handlers read from another database than the one that has the locks."""
    question, name = asked.question, asked.processor.name
    reads = router.db_for_read(question.model)
    if reads == question.using:
        yield ok("router", name, f"rows are locked, and read by handlers, on {reads!r}")
        return
    label = question.model._meta.label
    yield Finding(
        Level.WARNING,
        "router",
        name,
        f"rows of {label} are locked on {question.using!r}, and what handlers read goes to "
        f"{reads!r}",
        "The lock protects nothing that is read elsewhere: a replica may show a handler values "
        "from before the lock, also those that its last row has written",
        f"Let db_for_read() return {question.using!r} while a handler works, or read with "
        f".using({question.using!r})",
    )


def sharing_columns(asked: Sequence[Asked], among: Sequence[Asked]) -> Iterator[Finding]:
    """Find processors that share columns which each needs for itself; ``among``: all of them."""
    ours = {each.processor.name for each in asked}
    found: set[str] = set()
    users: list[sharing.User] = [(each.processor, each.question) for each in among]
    for pair in combinations(users, 2):
        names = [processor.name for processor, _ in pair]
        for message in sharing.check(pair) if ours & {*names} else ():
            if message.is_silenced():
                continue
            found |= {*names}
            yield Finding(
                Level.PROBLEM,
                "shared-columns",
                " and ".join(names),
                str(message.msg).rstrip("."),
                "Attempts of one are counted as those of the other, and a lease of one hides the "
                "row from the other",
                str(message.hint).rstrip("."),
            )
    for each in asked:
        if each.processor.name not in found:
            what = "no other processor writes to its retry, lease and claim columns"
            yield ok("shared-columns", each.processor.name, what)


def lease_times(asked: Asked) -> Iterator[Finding]:
    """Compare the lease with the slowest handler of the recorded runs, if there are any."""
    lease: Any = asked.processor.lease
    if lease is None:
        return
    name, slowest = asked.processor.name, pauses.slowest(asked.processor)
    if slowest is None:
        yield Finding(
            Level.LEFT_OUT,
            "lease",
            name,
            f"whether {lease.seconds:g} s are enough for the handler",
            "Only the ledger records how long handlers take, and it has no run",
            "Add the ledger, or compare it with the durations of your log or your metrics; a "
            "living worker renews the lease at a third of it",
        )
    elif lease.seconds < ENOUGH * slowest:
        yield Finding(
            Level.WARNING,
            "lease",
            name,
            f"the lease is for {lease.seconds:g} s, less than twice the {slowest:.3g} s of the "
            "slowest handler",
            "A living worker renews the lease at a third of it, but one that was suspended, or "
            "cannot reach the database, loses the row during such a handler, and another worker "
            "handles it again",
            f"Set a lease of {ENOUGH * slowest:.0f} s or more, or make the handler shorter",
        )
    else:
        yield ok("lease", name, f"the slowest handler took {slowest:.3g} s of {lease.seconds:g} s")
