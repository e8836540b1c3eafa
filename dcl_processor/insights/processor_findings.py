"""Findings about processors: their router, their columns, their lease and their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from django.db import router

from dcl_processor.checks import sharing
from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.masking import shown
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

from . import rows
from .answer import Finding, Level, as_utc, ok, problem, warning
from .rows import key_text
from .statements import Asked
from .status import has_ledger

#: A lease is to be at least so many times as long as the slowest handler of the last recorded runs.
ENOUGH, RUNS = 2, 100

#: Characters of a key, or of a primary key, that are shown.
_LONGEST = 80


def routing(asked: Asked) -> Iterator[Finding]:
    """Find whether handlers read from another database than the one that has the locks."""
    question = asked.question
    reads = router.db_for_read(question.model)
    if reads == question.using:
        yield ok(f"rows are locked, and read by handlers, on {reads!r}")
        return
    yield warning(
        f"rows of {question.model._meta.label} are locked on {question.using!r}, and what handlers "
        f"read goes to {reads!r}",
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
            if message.is_silenced() or not message.is_serious():
                continue
            found |= {*names}
            yield problem(
                str(message.msg).rstrip("."),
                "Attempts of one are counted as those of the other, and a lease of one hides the "
                "row from the other",
                str(message.hint).rstrip("."),
                about=" and ".join(names),
            )
    for name in [each.processor.name for each in asked if each.processor.name not in found]:
        yield ok("no other processor writes to its retry, lease and claim columns", about=name)


def lease_times(asked: Asked) -> Iterator[Finding]:
    """Compare the lease with the slowest handler of the recorded runs, if there are any."""
    lease: Any = asked.processor.lease
    if lease is None:
        return
    slowest = _slowest(asked.processor)
    if slowest is None:
        yield Finding(
            Level.LEFT_OUT,
            f"whether {lease.seconds:g} s are enough for the handler",
            "Only the ledger records how long handlers take, and it has no run",
            "Add the ledger, or compare it with the durations of your log or your metrics; a "
            "living worker renews the lease at a third of it",
        )
    elif lease.seconds < ENOUGH * slowest:
        yield warning(
            f"the lease is for {lease.seconds:g} s, less than twice the {slowest:.3g} s of the "
            "slowest handler",
            "A living worker renews the lease at a third of it, but one that was suspended, or "
            "cannot reach the database, loses the row during such a handler, and another worker "
            "handles it again",
            f"Set a lease of {ENOUGH * slowest:.0f} s or more, or make the handler shorter",
        )
    else:
        yield ok(f"the slowest handler took {slowest:.3g} s of {lease.seconds:g} s")


def _slowest(processor: BatchProcessor[Any]) -> float | None:
    """Return the seconds of the slowest handler that the ledger has, if it has any."""
    if not has_ledger():
        return None
    from dcl_processor.ledger import history  # has models

    return max((run.slowest for run in history(processor, limit=RUNS)), default=0.0) or None


def held_keys(asked: Asked) -> Iterator[Finding]:
    """Find the oldest row in doubt, or a head that is never tried again, that holds its key."""
    if asked.processor.group_by is None:
        return
    groups = groups_of(asked.processor, asked.question.model)
    found = [*_in_doubt(asked, groups), *_used_up(asked, groups)]
    if found:
        yield from found
    elif groups.in_flight is not None or groups.in_order:
        yield ok("no row holds its key until a person decides")


def _in_doubt(asked: Asked, groups: Groups) -> Iterator[Finding]:
    processor, at = asked.processor, asked.processor.claimed_at
    if at is None or processor.lease is not None:
        return
    found = rows.in_doubt(processor, asked.question, default_age(processor))
    assert found is not None
    oldest = found.filter(**{f"{groups.column}__isnull": False}).order_by(at)
    for pk, key, since in oldest.values_list("pk", groups.column, at)[:1]:
        when = f"{as_utc(since):%Y-%m-%d %H:%M:%S} UTC"
        yield _held(asked, groups, (key, pk), f"in doubt since {when}", "requeue or mark-done")


def _used_up(asked: Asked, groups: Groups) -> Iterator[Finding]:
    processor = asked.processor
    if not groups.in_order or processor._has_dead_letter:
        return  # another row goes on, or the key does after the dead letter
    retry = processor.retry
    left = None if retry is None else retry.has_attempts_left(groups.model)
    if left is None:
        return
    stuck = asked.question.unfiltered.filter(~left, **{f"{groups.column}__isnull": False})
    for pk, key in stuck.order_by("pk").values_list("pk", groups.column)[:1]:
        yield _held(asked, groups, (key, pk), "which has no attempts left", "requeue or discard")


def _held(asked: Asked, groups: Groups, found: tuple[Any, Any], why: str, actions: str) -> Finding:
    """Return the finding; ``found``: the key and the row."""
    key, pk = found
    name, row = asked.processor.name, shown(key_text(pk), _LONGEST)
    place = "no other row of the key is handled"
    if (groups.most or 1) > 1:
        place = f"one of the {groups.most} places of the key is taken"
    return problem(
        f"key {shown(str(key), _LONGEST)} is held by row {row}, {why}",
        f"Until a person decides, {place}",
        f"manage.py processors show {name} {row}, and then {actions}",
    )
