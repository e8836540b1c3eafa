"""What the audit must say of each processor, and whether it does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .audit import Call
from .blows import Blow

#: Seconds around a row's calls of which its history tells.
AROUND = 3.0
#: Seconds after a handler began from which its lease may have lapsed.
LAPSES_AFTER = 2.0
#: Seconds for which the settlement of a locked row is tried between other rows.
TRY_FOR = 5.0
NEVER = float("inf")


@dataclass(frozen=True)
class Terms:
    """What a processor promises.

    ``most``: rows of one key that are handled at once, 0: any number; without keys, of all rows.
    """

    delivery: str
    most: int = 0
    in_order: bool = False
    has_keys: bool = False


@dataclass(frozen=True)
class Row:
    """What the table says of a row at the end."""

    pk: int
    done: bool = False
    claimed: bool = False
    dead: bool = False
    #: Whether a lease, or a note of a failed attempt, is beside it.
    noted: bool = False
    #: The value of the column of ``group_by``.
    key: str = ""


@dataclass(frozen=True)
class Records:
    """All that is known of one processor's rows."""

    rows: Sequence[Row]
    calls: Sequence[Call]
    #: How often each row's work is in the database, and its flip was committed.
    worked: Mapping[int, int]
    settled: Mapping[int, int]
    in_doubt: Collection[int]
    blows: Sequence[Blow]
    #: When a person decided to requeue each row that was in doubt.
    decided: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass
class Verdict:
    """``faults``: each broken promise, with the row's history; ``counts``: what there is to say."""

    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def judge(terms: Terms, records: Records) -> Verdict:
    """Hold a processor to its promise."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in records.calls:
        calls[call.pk].append(call)
    unexplained = find_unexplained(records)
    verdict = Verdict(counts=_count(records, calls, unexplained))
    promise = {
        "transactional": _exactly_once,
        "at_most_once": _at_most_once,
        "at_least_once": _at_least_once,
    }[terms.delivery]
    for row in records.rows:
        of_row = calls.get(row.pk, [])
        wrong = [*_flipped_once(row, of_row, records), *promise(row, of_row, records, unexplained)]
        for what in wrong:
            verdict.faults.append(f"row {row.pk} {what}{_history(row.pk, of_row, records)}")
    verdict.faults += _of_keys(terms, records, calls)
    verdict.counts["faults"] = len(verdict.faults)
    return verdict


def _of_keys(terms: Terms, records: Records, calls: Mapping[int, Sequence[Call]]) -> Iterable[str]:
    """Find keys of which too many rows were handled at once, or some out of order."""
    of_key: dict[str, list[int]] = defaultdict(list)
    for row in records.rows:
        if terms.most and row.pk in calls:
            of_key[row.key].append(row.pk)
    for key, pks in of_key.items():
        if terms.in_order:
            yield from _overtaken(key, pks, terms, records, calls)
        in_time = sorted((call for pk in pks for call in calls[pk]), key=lambda call: call.began)
        yield from _too_many(key, in_time, terms, records)


def _overtaken(
    key: str,
    pks: Iterable[int],
    terms: Terms,
    records: Records,
    calls: Mapping[int, Sequence[Call]],
) -> Iterable[str]:
    for one, two in pairwise(sorted(pks)):
        late = calls[one][-1]
        # A worker whose session a blow has ended may begin the row that it had locked before.
        if late.began > calls[two][0].began and not _lost_key(terms, late, late.began, records):
            yield f"row {two} was handled before row {one} of key {key}"


def _too_many(key: str, in_time: Iterable[Call], terms: Terms, records: Records) -> Iterable[str]:
    """Count the calls that have the key whenever a further one begins."""
    at_work: list[Call] = []
    for call in in_time:
        at_work = [
            other
            for other in at_work
            if _keeps_key_until(terms, other, records) > call.began
            and not _lost_key(terms, other, call.began, records)
        ]
        at_work.append(call)
        if len(at_work) > terms.most:
            rows = " and ".join(str(each.pk) for each in at_work)
            yield f"rows {rows} of key {key} were handled at the same time"
            del at_work[0]  # found once


def _keeps_key_until(terms: Terms, call: Call, records: Records) -> float:
    """Return when the call's row frees its place in the key, unless that is lost before."""
    if terms.delivery == "at_most_once":
        # Neither the end of the handler nor a death frees the place of a row in doubt.
        for at in records.decided.get(call.pk, ()):
            if at > call.began:
                return at
        if call.pk in records.in_doubt:
            return NEVER
    return NEVER if call.over is None else call.over


def _lost_key(terms: Terms, call: Call, by: float, records: Records) -> bool:
    """Return whether the call may have lost its key, although its handler went on."""
    if terms.delivery == "at_most_once":
        return False
    # A lease may lapse without a blow, if its worker gets no time to renew it.
    lapsed = terms.delivery == "at_least_once" and by > call.began + LAPSES_AFTER
    return lapsed or any(_hits(blow, call, by) for blow in records.blows)


def _flipped_once(row: Row, calls: Sequence[Call], records: Records) -> Iterable[str]:
    settled = records.settled.get(row.pk, 0)
    if row.done and not calls:
        yield "is lost: it is done, and no handler was called"
    if row.done and settled != 1:
        yield f"is done, and was settled {settled} times"
    if not row.done and settled:
        yield f"is not done, and was settled {settled} times"
    if row.done and row.noted:
        yield "is half settled: it is done, and its lease or attempts are still there"
    if row.done and row.dead:
        yield "is done, and was given up on"
    if not (row.done or row.dead or row.claimed):
        yield "is left: it is still pending at the end"


def _exactly_once(
    row: Row, calls: Sequence[Call], records: Records, unexplained: Collection[int]
) -> Iterable[str]:
    worked = records.worked.get(row.pk, 0)
    if worked != 1:
        yield f"was worked on {worked} times in the database"
    if row.pk in unexplained:
        yield "was handled again for no reason"


def _at_most_once(
    row: Row, calls: Sequence[Call], records: Records, unexplained: Collection[int]
) -> Iterable[str]:
    decided = records.decided.get(row.pk, ())
    if not all(
        any(first.began < at < again.began for at in decided) for first, again in pairwise(calls)
    ):
        yield f"was handled {len(calls)} times"
    unsettled = row.claimed and not row.done
    if unsettled != (row.pk in records.in_doubt):
        yield "is claimed and not in doubt" if unsettled else "is in doubt and not claimed"
    if (unsettled or decided) and row.pk in unexplained:
        yield f"{'is' if unsettled else 'was'} in doubt for no reason"


def _at_least_once(
    row: Row, calls: Sequence[Call], records: Records, unexplained: Collection[int]
) -> Iterable[str]:
    if row.dead:
        yield "was given up on"


def find_unexplained(records: Records) -> set[int]:
    """Return the rows of which a call came to nothing though no blow hit it.

    A call is over when its process begins another one, or another one begins the same row. Until
    then a blow may have taken its process, its session, or its way to the server.
    """
    next_by_pid: dict[int, float] = {}
    next_of_row: dict[int, float] = {}
    done = {row.pk for row in records.rows if row.done}
    found = set()
    for call in reversed(records.calls):
        again = next_of_row.get(call.pk)
        if again is not None or call.pk not in done:
            over = min(again or float("inf"), next_by_pid.get(call.pid, float("inf")))
            if any(
                blow.kind == "lock_rows" and blow.began <= over and blow.ended >= call.began
                for blow in records.blows
            ):
                # A row that is locked at its settlement is settled between other rows.
                over = min(again or float("inf"), over + TRY_FOR)
            if not any(_hits(blow, call, over) for blow in records.blows):
                found.add(call.pk)
        next_by_pid[call.pid] = next_of_row[call.pk] = call.began
    return found


def _hits(blow: Blow, call: Call, over: float) -> bool:
    # A worker may begin one more row, which it had locked before, until it learns of the blow.
    if blow.began > over or blow.ended < call.before:
        return False
    # A watcher without copies is a worker itself.
    if blow.kind in {"kill_worker", "kill_watcher"}:
        return blow.ended >= call.began and call.pid in blow.pids
    # A session of which no handler said the number may be any of those that were ended.
    by_session = bool(blow.backends) and (call.backend is None or call.backend in blow.backends)
    return by_session or call.route in blow.routes


def _count(
    records: Records, calls: Mapping[int, Sequence[Call]], unexplained: Collection[int]
) -> dict[str, int]:
    times = Counter(min(len(calls.get(row.pk, ())), 2) for row in records.rows)
    return {
        "rows": len(records.rows),
        "called_0": times[0],
        "called_1": times[1],
        "called_2+": times[2],
        "done": sum(row.done for row in records.rows),
        "in_doubt": len(records.in_doubt),
        "requeued": len(records.decided),
        "given_up": sum(row.dead for row in records.rows),
        "work_doubled": sum(n > 1 for n in records.worked.values()),
        "settled_twice": sum(n > 1 for n in records.settled.values()),
        "unexplained": len(unexplained),
    }


def _history(pk: int, calls: Sequence[Call], records: Records) -> str:
    """Return what happened to a row, and around it, in the order of time."""
    if not calls:
        return ""
    start, end = calls[0].began - AROUND, calls[-1].began + AROUND
    events = [(call.began, f"process {call.pid} on {call.route} begins") for call in calls]
    events += [(call.ended, f"process {call.pid} ends") for call in calls if call.ended]
    events += [(at, "a person requeues it") for at in records.decided.get(pk, ())]
    events += [
        (blow.began, f"{blow.kind} {sorted(blow.pids | blow.backends)} {' '.join(blow.routes)}")
        for blow in records.blows
        if start <= blow.began <= end
    ]
    worked = f"worked {records.worked.get(pk, 0)}, settled {records.settled.get(pk, 0)}"
    lines = [f"  {at - calls[0].began:+8.3f} s  {what}" for at, what in sorted(events)]
    return "\n".join([f" ({worked}):", *lines])
