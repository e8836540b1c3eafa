"""What the log must say: how many rows of a key were in flight, and that none was overtaken.

Times are the machine's clock, in seconds, which the server and the workers share. A line is written
before what it says is committed, or before the handler is called, so that what comes after another
thing has a later time.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

ALWAYS, NEVER = float("-inf"), float("inf")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the log.

    ``what``: "begin" (of a handler), "held" (claimed, or leased until ``until``), "freed", or
    "done". ``turn``: when the handler's worker asked for the lock of the key.
    """

    row: int
    key: int
    what: str
    at: float
    turn: float = 0.0
    until: float = NEVER


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which a row waited in a key.

    It came at some moment from ``came`` to ``since``, and waited until ``until`` at most.
    """

    row: int
    key: int
    came: float = ALWAYS
    since: float = ALWAYS
    until: float = NEVER


@dataclass
class Verdict:
    faults: list[str] = field(default_factory=list)
    #: The most rows of a key that were in flight at any moment.
    most: int = 0
    handled: Counter[int] = field(default_factory=Counter)


def judge(
    lines: Sequence[Line], waits: Sequence[Wait], *, most: int, in_order: bool, claims: bool
) -> Verdict:
    """Return what is wrong.

    ``waits``: when each row came to a key, in the order of time; a row leaves it when it is done,
    or at the end that its wait has. ``most``: rows of a key that may be in flight, 0: any number.
    ``claims``: whether rows in flight are marked.
    """
    verdict = Verdict(handled=Counter(line.row for line in lines if line.what == "begin"))
    held = _held(lines, first="held" if claims else "begin")
    for key, spans in held.items():
        number = _most_at_once(spans)
        verdict.most = max(verdict.most, number)
        if most and number > most:
            verdict.faults.append(f"{number} rows of key {key} were in flight, of {most}")
    if in_order:
        verdict.faults += _overtaken(lines, _ended(lines, waits))
    return verdict


def _held(lines: Sequence[Line], *, first: str) -> dict[int, list[tuple[float, float]]]:
    """Return the times in which rows of each key were in flight."""
    held: dict[int, list[tuple[float, float]]] = defaultdict(list)
    since: dict[int, Line] = {}
    for line in lines:
        before = since.pop(line.row, None)
        if line.what == first or (line.what == "held" and before is not None):
            since[line.row] = line
        elif line.what == "begin" and before is not None:
            since[line.row] = before
            continue
        if before is not None:
            # A lease without a settlement ended when it lapsed, at the latest;
            # one that was renewed later, by a statement that began before, did not end.
            held[before.key].append((before.at, min(line.at, before.until)))
    for line in since.values():
        held[line.key].append((line.at, line.until))
    return held


def _most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    # At the same time, an end comes first.
    moments = sorted(chain.from_iterable([(a, 1), (b, -1)] for a, b in spans if b > a))
    number = most = 0
    for _, change in moments:
        number += change
        most = max(most, number)
    return most


def _ended(lines: Sequence[Line], waits: Sequence[Wait]) -> list[Wait]:
    """Return the waits, each with its end."""
    ends: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if line.what == "done":
            ends[line.row].append(line.at)
    ended = []
    for wait in waits:
        after = (at for at in ends[wait.row] if at > wait.came)
        ended.append(replace(wait, until=min(next(after, NEVER), wait.until)))
    return ended


def _overtaken(lines: Sequence[Line], waits: Sequence[Wait]) -> list[str]:
    """Find handlers that began while an earlier row of their key waited.

    It has to have waited when their worker asked for the key's lock, too: a row that came
    afterwards may come after them.
    """
    faults = []
    first: dict[int, list[tuple[int, float]]] = defaultdict(list)
    late: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.since == ALWAYS:
            first[wait.key].append((wait.row, wait.until))
        else:
            late[wait.key].append(wait)
    for heap in first.values():
        heapq.heapify(heap)
    for line in sorted((each for each in lines if each.what == "begin"), key=lambda each: each.at):
        heap = first[line.key]
        while heap and heap[0][1] <= line.at:
            heapq.heappop(heap)
        passed = {heap[0][0]} if heap and heap[0][0] < line.row else set()
        passed |= {
            wait.row
            for wait in late[line.key]
            if wait.row < line.row and wait.since < line.turn and wait.until > line.at
        }
        faults += [
            f"row {line.row} of key {line.key} was handled before row {row}"
            for row in sorted(passed)
        ]
    return faults
