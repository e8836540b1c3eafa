"""The one judge of all cells: runs until nothing changes, and compares the whole final state."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dcl_processor import Report
from dcl_processor.report.report import COUNTS
from tests.contract.support import errands as the
from tests.models import Errand

from .cells import LEAST, MOST, ROWS, TIMES, Cell
from .faults import fired, injected
from .ways import ATTEMPTS, Subject

#: Runs after which a cell has to stand still.
MOST_RUNS = 10

LAPSED = datetime(2020, 1, 1, tzinfo=UTC)


def judge(cell: Cell) -> None:
    the.errands(ROWS)
    times = None if cell.lasts else TIMES
    with injected(cell.stage, cell.answer, cell.place, times):
        subject = Subject(cell)
        runs = _until_still(subject)
        rows = {row.place: row for row in Errand.objects.all()}
        _judge_others(cell, subject, runs, rows)
        _judge_refused(cell, subject, runs, rows[cell.place])
        # Afterwards, as the trigger would refuse what empties the table.
        Errand.objects.all().delete()


def _until_still(subject: Subject) -> list[Report]:
    """Run until a run has changed nothing; leases that are left lapse in between."""
    runs: list[Report] = []
    before: list[Any] = []
    while len(runs) < MOST_RUNS:
        done = _done()
        came = subject.run()
        runs.append(came)
        assert came.processed == len(_done() - done), (came, "rows that are done now")
        assert not _done() & _failed(came), (came, "is done, and was reported as failed")
        Errand.objects.filter(leased_until__isnull=False).update(leased_until=LAPSED)
        calls = subject.calls.copy()
        cell = subject.cell
        if not cell.retries or cell.is_unrecorded:
            del calls[cell.place]  # it is tried in every run
        uncounted = cell.is_unrecorded and cell.delivery == LEAST
        now = [0 if cell.lasts else fired(), calls, *_state(without=uncounted)]
        if now == before:
            return runs
        before = now
    raise AssertionError(f"expected a run that changes nothing, got {runs}, {before}")


def _failed(came: Report) -> set[Any]:
    return {each.pk for each in came.failures}


def _done() -> set[Any]:
    return {*Errand.objects.filter(done=True).values_list("pk", flat=True)}


def _state(*, without: bool) -> list[Any]:
    """Return the rows; ``without``: their attempts, which each claim of a lease counts."""
    names = ["pk", "done", "dead", "claimed", "leased_until", "last_error"]
    names += [] if without else ["attempts"]
    return [*Errand.objects.order_by("pk").values_list(*names)]


def _judge_others(
    cell: Cell, subject: Subject, runs: list[Report], rows: dict[int, Errand]
) -> None:
    """Judge the rows beside the refused one: they are done, and none has failed."""
    others = [place for place in rows if place != cell.place]
    left = [place for place in others if not rows[place].done or _is_marked(rows[place])]
    assert not left, f"rows {left} are not done: {runs}"
    assert all(subject.calls[place] >= 1 for place in others)
    if not cell.in_transaction:
        again = [place for place in others if subject.calls[place] > 1]
        assert not again, f"rows {again} were handled again: {runs}"
    assert not [each for each in runs if _failed(each) - {rows[cell.place].pk}], runs


def _judge_record(cell: Cell, calls: int, more: int, row: Errand, said: Any) -> None:
    """Judge what is recorded of a row that failed for the last time, or is in doubt."""
    if cell.stage in ("flip", "look") and cell.delivery == MOST:
        assert row.claimed, said
        assert calls == 1, said
        return
    assert row.attempts == ATTEMPTS, said
    assert row.dead or cell.stage == "dead letter", said
    assert row.last_error or cell.stage == "record", said
    # The values of ``failed`` take a claimed row out of pending, and leave it claimed.
    assert row.claimed == (cell.delivery == MOST), said
    assert row.leased_until is None, said
    # Without its time a person would not see a row that is in doubt.
    assert (row.claimed_at is not None) == (row.claimed and not row.dead), said
    if cell.fails:
        assert ATTEMPTS <= calls <= ATTEMPTS + more, said


def _judge_unrecorded(cell: Cell, calls: int, row: Errand, said: Any) -> None:
    """Judge a row that has failed, and of which that cannot be written."""
    if cell.delivery == MOST:
        assert row.claimed, said
        assert row.claimed_at is not None, said
        assert 1 <= calls <= ATTEMPTS, said
    elif cell.delivery == LEAST:
        assert 1 <= calls <= ATTEMPTS, said  # they are counted by its claims
    else:
        assert calls >= 1, said


def _was_skipped(runs: list[Report]) -> bool:
    """Return whether the claim was left to a later pass, as that of a locked row is."""
    others = [name for name in COUNTS if name != "processed"]
    return all(each.skipped == sum(getattr(each, name) for name in others) == 1 for each in runs)


def _is_marked(row: Errand) -> bool:
    return row.claimed or row.leased_until is not None or row.claimed_at is not None


def _judge_refused(cell: Cell, subject: Subject, runs: list[Report], row: Errand) -> None:
    calls, said = subject.calls[cell.place], (subject.calls, runs, vars(row))
    more = sum(each.redone for each in runs)
    if cell.fails and cell.in_transaction and not cell.lasts:
        more += TIMES  # an attempt whose record is refused is logged, and counts nowhere
    most = ATTEMPTS
    if not (cell.lasts or cell.fails):
        assert row.done, said
        assert not _is_marked(row), said
        assert calls >= 1, said
        if cell.stage in ("flip", "look") and not cell.in_transaction:
            most = 1
            assert not sum(each.failed for each in runs), said
    elif cell.stage == "renewal":
        return
    else:
        assert not row.done, said
        assert sum(each.failed for each in runs) or _was_skipped(runs), said
        if not cell.retries or cell.is_unrecorded:
            most = max(most, len(runs))  # it is tried in each of them
        if cell.retries:
            _judge_left(cell, calls, more, row, said)
    assert subject.calls.total() <= ROWS - 1 + most + more, said


def _judge_left(cell: Cell, calls: int, more: int, row: Errand, said: Any) -> None:
    """Judge a row of a processor with a ``retry`` that is not done in the end."""
    if cell.stage == "mark" and cell.is_about_the_row:
        # Its handler is not called, and nothing is charged.
        assert (row.attempts, row.dead, calls) == (0, False, 0), said
    elif cell.is_unrecorded:
        _judge_unrecorded(cell, calls, row, said)
    elif cell.stage != "claim" and (cell.is_about_the_row or cell.fails):
        _judge_record(cell, calls, more, row, said)
