"""How fast rows flow, and how soon they flow again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from .audit import Call
from .blows import Blow

Span = tuple[float, float]


def rate(calls: Sequence[Call], span: Span) -> float:
    """Return the rows per second that were handled to the end, each counted once."""
    first: dict[int, float] = {}
    for call in calls:
        if call.ended is not None:
            first.setdefault(call.pk, call.ended)
    start, end = span
    return sum(start <= ended < end for ended in first.values()) / max(end - start, 0.001)


def longest_pause(calls: Sequence[Call], span: Span) -> float:
    """Return the seconds of the longest time in which no row was handled to its end."""
    start, end = span
    ends = sorted(call.ended for call in calls if call.ended and start <= call.ended < end)
    moments = [start, *ends, end]
    return max(after - before for before, after in pairwise(moments))


def recoveries(calls: Sequence[Call], blows: Sequence[Blow], end: float) -> dict[str, list[float]]:
    """Return, for each kind of blow, how many seconds after each one rows flowed again.

    Counted from the end of the blow to the next row that was begun and ended after it on the
    routes that it hit; after a kill, by a process that is new there. What the end of the rows or
    of the chaos cut short is left out.
    """
    ended = [call for call in calls if call.ended is not None]
    seen: dict[str, list[float]] = defaultdict(list)
    for blow in blows:
        after = [call for call in ended if call.began >= blow.ended and _is_there(call, blow)]
        if blow.kind in {"kill_worker", "kill_watcher"}:
            old = {call.pid for call in calls if call.began < blow.ended}
            after = [call for call in after if call.pid not in old]
        if after and blow.ended < end:
            seen[blow.kind].append(min(call.ended or 0.0 for call in after) - blow.ended)
    return seen


def _is_there(call: Call, blow: Blow) -> bool:
    return not blow.routes or call.route in blow.routes


def summary(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        kind: {"blows": len(each), "median": round(median(each), 2), "worst": round(max(each), 2)}
        for kind, each in sorted(seconds.items())
    }
