"""An interrupt between the claim's commit and the handler costs no row an attempt: I10."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from django.db import connection

import dcl_processor
from dcl_processor.delivery.deliveries import deliver
from dcl_processor.delivery.marks import MarkedRows
from dcl_processor.execution.handler import execute
from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

#: What is called first when the claim has been committed, and what calls the handler: from there on
#: nobody can tell whether it has begun.
COMMITTED: CodeType = MarkedRows.record_commit.__code__
BEGUN: CodeType = execute.__code__

PACKAGE = str(Path(dcl_processor.__file__).parent)

PROCESSORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "claim and time": (the.at_most_once, {}),
    "claim alone": (the.at_most_once, {"claimed_at": None}),
    "flip alone": (the.at_most_once, {"claimed_at": None, "claim": None}),
    "lease": (the.at_least_once, {"retry": the.retry()}),
}


@contextmanager
def profiled(profile: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call the function at each call and return of this thread."""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def interrupted(at: int, claims: int) -> Iterator[None]:
    """Raise as Ctrl-C does, where a function is entered: ``at`` calls after so many claims."""
    left, calls = claims, 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left, calls
        if event == "call":
            left -= frame.f_code is COMMITTED
            # CPython's own locks fail with other errors when they are interrupted.
            calls += left <= 0 and frame.f_code.co_filename != threading.__file__
            if left <= 0 and frame.f_code is BEGUN:
                sys.setprofile(None)
            elif calls > at and frame.f_code.co_filename != threading.__file__:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with profiled(profile):
        yield


@pytest.mark.parametrize("claims", [1, 2], ids=["first claim", "second claim"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_i10_an_interrupt_before_the_handler_leaves_its_row_as_it_was(
    kind: str, claims: int
) -> None:
    """At each point of the way there; the first claim has a transaction, others a statement."""
    make, options = PROCESSORS[kind]
    for at in count():
        Errand.objects.all().delete()
        rows = the.errands(2)
        handled: list[Any] = []
        with suppress(KeyboardInterrupt), interrupted(at, claims):
            make(lambda row: handled.append(row.pk), **options)()  # noqa: B023  # called here
        if len(handled) >= claims:
            assert at > 5
            return
        assert [the.state(row)["done"] for row in rows] == [row.pk in handled for row in rows]
        assert all(the.untouched(row) for row in rows if row.pk not in handled), at


def test_an_interrupt_in_the_commit_puts_no_claim_of_another_copy_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim was not committed, and without a time it looks like that of any copy."""
    [row] = the.errands(1)

    def commit() -> None:
        monkeypatch.undo()
        connection.connection.rollback()
        claimed = Errand.objects.filter(pk=row.pk, claimed=False)
        assert the.elsewhere(lambda: claimed.update(claimed=True)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "_commit", commit)
    with pytest.raises(KeyboardInterrupt):
        the.at_most_once(the.ignore, claimed_at=None, reset={"claimed": False})()
    assert the.state(row)["claimed"] is True
    assert the.state(row)["done"] is False


def is_of_the_package(frame: FrameType) -> bool:
    """Say whether the package called, or is called: each line of it that does something."""
    callers = (frame, frame.f_back)
    return any(caller and caller.f_code.co_filename.startswith(PACKAGE) for caller in callers)


@contextmanager
def interrupted_after(handled: list[Any], at: int) -> Iterator[None]:
    """Raise as Ctrl-C does, ``at`` calls after a handler has returned, within its delivery."""
    calls = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "return" and frame.f_code is deliver.__code__:
            sys.setprofile(None)
        elif event == "call" and handled and is_of_the_package(frame):
            calls += 1
            if calls > at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with profiled(profile):
        yield


@pytest.mark.parametrize("kind", ["claim and time", "claim alone", "lease"])
def test_i10_an_interrupt_after_the_handler_is_reported_as_it_left_the_row(kind: str) -> None:
    """At each point: what the report counts as processed is done, and nothing else is."""
    make, options = PROCESSORS[kind]
    found: set[bool] = set()
    for at in count():
        Errand.objects.all().delete()
        [row] = the.errands(1)
        handled: list[Any] = []
        try:
            with interrupted_after(handled, at):
                make(lambda row: handled.append(row.pk), **options)()  # noqa: B023  # called here
        except KeyboardInterrupt as error:
            done = the.state(row)["done"]
            report = error.report  # type: ignore[attr-defined]  # as documented
            assert (report.processed, report.failed) == (done, 0), at
            found.add(done)
        else:
            assert at > 50
            assert found == {False, True}
            return


@contextmanager
def interrupted_between(handled: list[Any], at: int) -> Iterator[None]:
    """Raise as Ctrl-C does, ``at`` calls of a delivery after the second handler.

    They are those until the third handler begins, of both rows' deliveries.
    """
    calls = deliveries = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, deliveries
        if frame.f_code is deliver.__code__:
            deliveries += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and len(handled) == 2 and frame.f_code is BEGUN:
            sys.setprofile(None)
        elif event == "call" and len(handled) == 2 and deliveries and is_of_the_package(frame):
            calls += 1
            if calls > at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with profiled(profile):
        yield


@pytest.mark.parametrize(
    # Elsewhere an interrupt in the COMMIT leaves open whether it took effect.
    "kind",
    [*(["transactional"] if SENDS_SEVERAL else []), "claim and time", "claim alone", "lease"],
)
def test_i10_an_interrupt_between_two_rows_is_reported_as_it_left_them(kind: str) -> None:
    """What is written for one row may wait for the claim of the next one."""
    make, options = {"transactional": (the.transactional, {}), **PROCESSORS}[kind]
    for at in count():
        Errand.objects.all().delete()
        rows = the.errands(4)
        handled: list[Any] = []
        try:
            with interrupted_between(handled, at):
                make(lambda row: handled.append(row.pk), **options)()  # noqa: B023  # called here
        except KeyboardInterrupt as error:
            report = error.report  # type: ignore[attr-defined]  # as documented
            done = [row.pk for row in rows if the.state(row)["done"]]
            assert (report.processed, report.failed, report.lease_lost) == (len(done), 0, 0), at
            assert done[:1] == handled[:1]
            assert connection.execute_wrappers == []
            assert all(the.untouched(row) for row in rows[3:])
        else:
            assert at > 50
            return
