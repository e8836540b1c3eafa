"""Two workers of one processor, as an example says they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Report, batch_processor
from dcl_processor.exceptions import ProcessorError
from tests import models as tables
from tests.contract.support.errands import meanwhile
from tests.contract.support.gate import other_than, run_and_meanwhile
from tests.fuzz.cases import RACE, STRANGER, Case
from tests.fuzz.fresh import stale_facts
from tests.fuzz.oracle import Columns
from tests.waiting import PATIENCE, Barrier

#: What the handler writes into a spare column.
MARK = "by the handler"


@dataclass
class Met:
    """What came of it."""

    before: Mapping[Any, Columns] = field(default_factory=dict)
    #: The keys of the rows that were handed to a handler, each time.
    handled: list[Any] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    refusals: list[ProcessorError] = field(default_factory=list)
    #: What a handler saw that was not so under its lock, and every error that is no refusal.
    wrong: list[Any] = field(default_factory=list)
    #: Whether the other copy or the stranger has come, and the rows handled before that.
    came: bool = False
    early: set[Any] = field(default_factory=set)


def meet(case: Case, before: Mapping[Any, Columns]) -> Met:
    """Let two workers handle the rows of an example; ``before``: what these say, by key."""
    met = Met(before=before)
    if case.meeting == RACE:
        _race(case, met)
        return met
    using = case.queryset()._db or "default"
    outsider = other_than(using)

    def act() -> None:
        met.came = True
        if case.meeting == STRANGER:
            change_what_is_beside(outsider)
        else:
            _copy(case, met, outsider)

    # An error of the copy in the middle stays there, as it would in another process.
    try:
        run_and_meanwhile(lambda: _copy(case, met, using), act, using=using, at=case.at)
    except AssertionError as error:
        # A run of one batch has no second lock statement, and a refused one may have none.
        expected = bool(case.at or met.refusals)
        if "expected lock statement" not in str(error) or not expected:
            met.wrong.append(error)
    if not met.came and case.at:
        act()
    return met


def change_what_is_beside(using: str) -> None:
    """Turn every flag beside the rows round, and every name."""
    flags: list[tuple[Any, str]] = [
        (tables.Depot, "open"),
        (tables.Scan, "ok"),
        (tables.Receipt, "printed"),
    ]
    for model, name in flags:
        rows: QuerySet[Any] = QuerySet(model, using=using)
        on = list(rows.filter(**{name: True}).values_list("pk", flat=True))
        rows.update(**{name: True})
        rows.filter(pk__in=on).update(**{name: False})
    for named in (tables.Depot, tables.Tag):
        QuerySet[Any](named, using=using).filter(name="a").update(name="c")


def _race(case: Case, met: Met) -> None:
    start = Barrier(2)

    def copy() -> None:
        start.wait()
        _copy(case, met, None)

    with meanwhile(copy) as one, meanwhile(copy) as other:
        pass
    met.wrong += [each for each in (*one, *other) if each is not None]


def _copy(case: Case, met: Met, using: str | None) -> None:
    try:
        met.reports.append(processor(case, met).run(using=using, wait_for_locked=PATIENCE))
    except ProcessorError as error:
        met.refusals.append(error)
    except Exception as error:  # noqa: BLE001  # judged with all else
        met.wrong.append(error)


def processor(case: Case, met: Met) -> BatchProcessor[Any]:
    """Return the processor, whose handler looks whether what it was given is so."""

    def handle(row: Any) -> None:
        met.handled.append(row.pk)
        if not met.came:
            met.early.add(row.pk)
        try:
            met.wrong += stale_facts(case, row, met.before.get(row.pk))
        except Exception as error:
            met.wrong.append(error)
            raise
        if case.spare:
            case.rows(row._state.db).filter(pk=row.pk).update(**{case.spare: MARK})

    make: Callable[..., Any] = batch_processor(
        pending=case.queryset, done=case.done(), name="fuzz", **{**case.options, **case.delivered()}
    )
    made: BatchProcessor[Any] = make(handle)
    return made
