"""Findings about keys that a row holds until a person decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.masking import shown
from dcl_processor.operator_states import default_age

from . import rows
from .answer import as_utc
from .findings import Finding, Level, ok
from .keys import key_text
from .statements import Asked

#: Characters of a key, or of a primary key, that are shown.
_LONGEST = 80


def held_keys(asked: Asked) -> Iterator[Finding]:
    """Find the oldest row in doubt, or a head that is never tried again, that holds its key."""
    if asked.processor.group_by is None:
        return
    groups = groups_of(asked.processor, asked.question.model)
    found = [*_in_doubt(asked, groups), *_used_up(asked, groups)]
    if found:
        yield from found
    elif groups.in_flight is not None or groups.in_order:
        yield ok("held-key", asked.processor.name, "no row holds its key until a person decides")


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
    return Finding(
        Level.PROBLEM,
        "held-key",
        name,
        f"key {shown(str(key), _LONGEST)} is held by row {row}, {why}",
        f"Until a person decides, {place}",
        f"manage.py processors show {name} {row}, and then {actions}",
    )
