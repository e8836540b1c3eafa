"""The database ends a copy's session while its handler is at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from dcl_processor import BatchProcessor, Report, batch_processor
from dcl_processor.pending import scan
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.crash import processors
from tests.crash.audit import effects
from tests.crash.rows import FIRST, ROWS, SECOND, THIRD, fresh, rows, those, work
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _three_rows(audit: str) -> None:
    fresh(*ROWS)


def returns(row: Errand) -> None:
    """Let the handler notice nothing."""


def asks(row: Errand) -> None:
    Errand.objects.using("other").get(pk=row.pk)


def swallows(row: Errand) -> None:
    try:
        asks(row)
    except Exception:  # noqa: BLE001  # whatever the driver says
        return


def ending(
    options: dict[str, Any],
    then: Callable[[Errand], None],
    act: Callable[[Errand], None] = processors.act,
) -> BatchProcessor[Errand]:
    """Make a processor whose session ends when it handles the first row for the first time."""
    ended: list[int] = []

    @batch_processor(**options)
    def errand(row: Errand) -> None:
        act(row)
        if row.pk == FIRST and not ended:
            ended.append(row.pk)
            end_session(connections["other"])
            then(row)

    return errand


THEN = pytest.mark.parametrize("then", [returns, asks, swallows], ids=lambda then: then.__name__)


@THEN
def test_transactional_the_row_is_not_settled_and_the_run_goes_on(
    then: Callable[[Errand], None],
) -> None:
    errand = ending(processors.plain, then, processors.act_here_too)
    report = errand(using="other")
    assert_run(report, processed=2, failed=1)
    assert those(lambda row: row.done) == {SECOND, THIRD}
    assert work() == Counter([SECOND, THIRD])
    assert_run(errand(using="other"), processed=1)
    assert work() == Counter(ROWS)
    assert effects() == Counter([*ROWS, FIRST])


@THEN
def test_transactional_another_copy_takes_the_row_and_the_first_settles_nothing(
    then: Callable[[Errand], None],
) -> None:
    """The second handler starts while the first still runs: documented, and without harm here."""
    others: list[Report] = []

    def meanwhile(row: Errand) -> None:
        others.append(processors.transactional(limit=1))
        then(row)

    errand = ending({**processors.plain, **processors.again}, meanwhile, processors.act_here_too)
    report = errand(using="other")
    [other] = others
    assert_run(other, processed=1, stopped="limit")
    assert_run(report, processed=2, failed=1)
    assert those(lambda row: row.done) == set(ROWS)
    assert those(lambda row: row.attempts) == set()
    assert work() == Counter(ROWS)
    assert effects() == Counter([*ROWS, FIRST])


def test_at_most_once_a_handler_that_fails_with_its_session_is_noted_and_not_repeated() -> None:
    errand = ending({**processors.claimed, "failed": {"dead": True, "claimed": False}}, asks)
    assert_run(errand(using="other"), processed=2, failed=1)
    assert rows()[FIRST].dead
    assert_run(errand(using="other"))
    assert effects() == Counter(ROWS)


def test_at_least_once_a_handler_that_fails_with_its_session_is_tried_again() -> None:
    errand = ending(processors.leased, asks)
    assert_run(errand(using="other"), processed=2, failed=1, to_retry=1)
    assert (rows()[FIRST].attempts, rows()[FIRST].leased_until) == (1, None)
    assert_run(errand(using="other"), processed=1)
    assert rows()[FIRST].attempts == 0  # a success clears them
    assert effects() == Counter([*ROWS, FIRST])


@pytest.mark.parametrize("order", [(), ("pk",)], ids=["by key", "in order"])
@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_session_that_ends_between_two_looks_costs_the_run_nothing(
    look: int, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window is asked for afresh; its row alone is read then, and no lock was held."""
    monkeypatch.setattr(scan, "WINDOW", 1)
    looks = 0

    def pending() -> Any:
        nonlocal looks
        looks += 1
        if looks == look:
            end_session(connections["other"])
        return Errand.objects.filter(done=False).order_by(*order)

    errand = batch_processor(**{**processors.plain, "pending": pending})(returns)
    assert_run(errand(using="other"), processed=3)
    assert looks >= look
    assert those(lambda row: row.done) == set(ROWS)
