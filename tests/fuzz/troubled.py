"""Whether rows come out right whose handlers do more than succeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fuzz import keyed, model, oracle
from tests.fuzz.acting import Log
from tests.fuzz.cases import CLOCK, MOST, STRANGER, Case
from tests.fuzz.meeting import Met, meet, run
from tests.fuzz.oracle import Columns, Flipped
from tests.waiting import PATIENCE

#: Runs after the meeting, at most: each calls a row's handler once, or one handler of each key.
RUNS = 6 * MOST

COUNTED = ("processed", "failed", "snoozed", "discarded", "lease_lost")


def fits(case: Case, flips: Mapping[Any, Flipped]) -> bool:
    """Tell whether every flip of the example is right, and only the handlers are in trouble."""
    return case.meeting != STRANGER and all(
        each.leaves
        and each.possible
        and each.is_put_back
        and (case.failed is None or each.failed_as is not None)
        for each in flips.values()
    )


def play(case: Case, before: Mapping[Any, Columns], flips: Mapping[Any, Flipped]) -> Met:
    """Let two workers meet, and others run until nothing is left; judge, and do it again."""
    assert case.trouble is not None
    met = meet(case, before)
    if met.wrong or met.refusals:
        return met
    _finish(case, met)
    rows = _judge(case, met, before, flips)
    settled = {pk for pk, row in rows.items() if row.settled}
    if case.trouble.again and settled:
        _make_pending(case, settled, before)
        now = oracle.everything(case)
        again = Met(before=now, log=Log(met.log.places), came=True, order=keyed.order_of(case))
        _finish(case, again)
        _judge(case, again, now, {pk: flips[pk] for pk in settled})
        met.wrong += again.wrong
    return met


def _finish(case: Case, met: Met) -> None:
    for _ in range(RUNS):
        calls = len(met.log.calls)
        met.reports.append(run(case, met, None, patience=PATIENCE))
        if len(met.log.calls) == calls:
            return
    raise AssertionError(f"rows are handed out without end: {met.log.calls}")


def _judge(
    case: Case, met: Met, before: Mapping[Any, Columns], flips: Mapping[Any, Flipped]
) -> dict[Any, model.Row]:
    assert not met.wrong, met.wrong
    rows, counts = model.replay(case, flips, before, met.log.calls)
    after = oracle.everything(case)
    reports = [*met.reports, *met.takeovers]
    kept_back = keyed.kept_back(case, after)
    for pk, is_ in after.items():
        calls = [call for call in met.log.calls if call.pk == pk]
        expected = model.told_roughly(case, before[pk])
        if pk in rows:
            is_left = rows[pk].is_open and pk not in kept_back
            assert not is_left, f"row {pk} is left as {is_}: {calls}, {reports}"
            expected = rows[pk].expected(calls)
        said = model.told_roughly(case, is_)
        assert said == expected, f"row {pk} is {said}, expected {expected} after {calls}"
    for name in COUNTED:
        number = sum(getattr(report, name) for report in reports)
        assert number == counts[name], (name, number, counts, met.log.calls)
    assert all(report.stopped == "drained" for report in reports), reports
    assert not any(report.skipped for report in met.reports), met.reports
    return rows


def _make_pending(case: Case, pks: set[Any], before: Mapping[Any, Columns]) -> None:
    """Write what the rows said at first, but for what the package keeps in them."""
    kept = {CLOCK, model.ATTEMPTS, model.NEXT_ATTEMPT, model.LAST_ERROR}
    links = {link.attname for link in case.world.model._meta.parents.values() if link}
    names = {
        field.attname
        for field in case.world.model._meta.concrete_fields
        if not (field.primary_key or field.generated)
    }
    for pk in pks:
        values = {name: before[pk][name] for name in names - kept - links}
        case.rows().filter(pk=pk).update(**values)
