"""The mark beside a lease: a row shows that it is being handled, and stays in ``pending``."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Value
from django.db.models.functions import Concat
from django.utils import timezone

from dcl_processor import BatchProcessor, Discard, Snooze, worker, worker_name
from dcl_processor.exceptions import InvalidDone, InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.marking import marking
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def seen(row: Any) -> dict[str, Any]:
    """Return what other sessions read of a row now."""
    read = the.elsewhere(lambda: Errand.objects.using("other").get(pk=row.pk))
    times = {name: getattr(read, name) is not None for name in ("claimed_at", "leased_until")}
    return {"claimed": read.claimed, "result": read.result, "attempts": read.attempts, **times}


MARKED = {"claimed": True, "result": "me", "attempts": 1, "claimed_at": True, "leased_until": True}
UNMARKED = {"claimed": False, "result": "", "claimed_at": False, "leased_until": False}


def left_by_a_dead_worker(**values: Any) -> Errand:
    """Make a row as a killed worker leaves it, after its lease has lapsed."""
    ago = timezone.now() - timedelta(days=1)
    mark = {"claimed": True, "result": "dead", "claimed_at": ago, "leased_until": ago}
    return Errand.objects.create(**{**mark, "attempts": 1, **values})


@pytest.mark.parametrize("size", [1, 3])
def test_the_mark_is_there_while_the_handler_works_and_gone_afterwards(size: int) -> None:
    rows = the.errands(3)
    while_at_work: list[Any] = []

    def handle(row: Errand) -> None:
        while_at_work.append(seen(row))
        assert (row.claimed, row.result, row.claimed_at is not None) == (True, "me", True)

    assert_run(marking(handle, batch_size=size)(), processed=3)
    assert while_at_work == [MARKED] * 3
    for row in rows:
        said = the.state(row)
        # Only the times go with a success; the rest is what done writes.
        assert (said["done"], said["claimed"], said["result"]) == (True, False, "me")
        assert (said["claimed_at"], said["leased_until"]) == (False, False)


def fail(row: Errand) -> None:
    raise ValueError("no")


def snooze(row: Errand) -> None:
    raise Snooze


def discard(row: Errand) -> None:
    raise Discard("never")


@pytest.mark.parametrize("taken_over", [False, True], ids=["fresh", "taken over"])
@pytest.mark.parametrize(
    ("handler", "options", "expected"),
    [
        (fail, {}, {"attempts": 1}),
        (fail, {"retry": None}, {"attempts": 0}),
        (fail, {"retry": None, "failed": {"dead": True}}, {"attempts": 0, "dead": True}),
        (fail, {"retry": the.retry(max_attempts=1), "failed": {"dead": True}}, {"dead": True}),
        (fail, {"retry": the.retry(max_attempts=1)}, {"attempts": 1}),
        (snooze, {}, {"attempts": 0}),
        (snooze, {"retry": None}, {"attempts": 0}),
        (discard, {"failed": {"dead": True, "result": "why"}}, {"dead": True, "result": "why"}),
        (discard, {}, {}),
    ],
)
def test_what_is_not_handled_gets_reset_and_never_the_mark_that_was_there_before(
    handler: Any, options: dict[str, Any], expected: dict[str, Any], taken_over: bool
) -> None:
    row = left_by_a_dead_worker(attempts=0) if taken_over else the.errands(1)[0]
    marking(handler, **options)()
    said = the.state(row)
    assert {name: said[name] for name in {**UNMARKED, **expected}} == {**UNMARKED, **expected}
    assert not said["done"]


def assert_put_back_with_what_shows_the_death(row: Errand) -> None:
    """Check that the row has no mark, but a lease that shows the next worker the death."""
    said = the.state(row)
    assert {**said, **UNMARKED, "leased_until": True, "attempts": 0, "done": False} == said
    taken_over: list[int] = []
    run = marking(the.ignore, taken_over=lambda row: taken_over.append(row.pk))
    assert_run(run(filter=the.only(row)), processed=1)
    assert taken_over == [row.pk]


def test_a_row_that_was_not_started_gets_reset() -> None:
    """The run stops after the first row of its batch."""
    the.errands(1)
    other = left_by_a_dead_worker(attempts=0)
    stop = Event()
    report = marking(lambda row: stop.set(), batch_size=2)(stop=stop)
    assert_run(report, processed=1, stopped="signal")
    assert_put_back_with_what_shows_the_death(other)


def test_a_row_that_other_code_marks_is_left_to_it() -> None:
    """The form of pending that the documentation and the check recommend."""
    row = Errand.objects.create(claimed=True, result="old loop")
    assert_run(marking(the.ignore)())
    assert the.state(row)["result"] == "old loop"


# --- a row must stay in pending under its mark


LOST = Errand.objects.filter(claimed=False, done=False)


def test_a_mark_that_takes_its_row_out_of_pending_is_refused_before_any_handler() -> None:
    [row] = the.errands(1)
    handled: list[Any] = []
    run = marking(lambda row: handled.append(row.pk), pending=LOST)
    words = (
        r"expected claim={'claimed': True, .*} to keep row \d+ in pending under its lease, .* got "
        r"a row that left pending; .* add … \| Q\(claimed=True, leased_until__isnull=False\) to"
    )
    with pytest.raises(InvalidDone, match=words):
        run()
    assert (handled, the.untouched(row)) == ([], True)


def test_each_row_is_checked_where_one_that_stays_does_not_show_that_all_stay() -> None:
    """Rows of one place stay in pending under the mark, and those of others do not."""
    some = LOST | Errand.objects.filter(place=0, claimed=True, done=False)
    rows = the.errands(3)
    handled: list[Any] = []
    with pytest.raises(InvalidDone, match=rf"to keep row {rows[1].pk} in pending"):
        marking(lambda row: handled.append(row.pk), pending=some)()
    assert handled == [rows[0].pk]
    assert the.untouched(rows[1])


@pytest.mark.parametrize(
    "claim",
    [{"result": F("last_error")}, {"result": Concat("last_error", Value("!"))}],
)
def test_a_mark_of_an_expression_is_read_back(claim: dict[str, Any]) -> None:
    [row] = the.errands(1, last_error="x")
    read: list[str] = []
    run = marking(lambda row: read.append(row.result), claim=claim, retry=None)
    assert_run(run(), processed=1)
    assert read == [the.state(row)["result"]]
    assert read[0].startswith("x")


# --- which rows are in progress


def test_in_progress_is_what_has_a_mark_and_a_living_lease() -> None:
    left_by_a_dead_worker()
    rows = the.errands(1)[:2]
    found: list[Any] = []

    def handle(row: Errand) -> None:
        asked = run.in_progress().using("other").values_list("pk", "result")
        found.append(the.elsewhere(lambda: list(asked)))

    run = marking(handle)
    assert not run.in_progress().exists()
    assert_run(run(), processed=2)
    assert found == [[(row.pk, "me")] for row in rows]
    assert not run.in_progress().exists()


def test_in_progress_is_what_is_leased_or_claimed_without_a_mark_on_a_lease() -> None:
    [leased, claimed, _] = the.errands(3)
    soon = timezone.now() + timedelta(hours=1)
    Errand.objects.filter(pk=leased.pk).update(leased_until=soon)
    Errand.objects.filter(pk=claimed.pk).update(claimed=True, claimed_at=timezone.now())
    assert list(the.at_least_once(the.ignore).in_progress()) == [leased]
    assert list(the.at_most_once(the.ignore).in_progress()) == [claimed]


@pytest.mark.parametrize(
    "run",
    [the.transactional(the.ignore), the.at_most_once(the.ignore, claimed_at=None)],
    ids=["transactional", "no time"],
)
def test_in_progress_needs_what_shows_it(run: BatchProcessor[Errand]) -> None:
    with pytest.raises(InvalidOption, match=r"expected a lease, or claim=… and claimed_at=…, for"):
        run.in_progress()


def test_no_row_on_a_lease_is_in_doubt() -> None:
    words = r"expected a processor without a lease for in_doubt\(\), got Lease\(.*in_progress\(\)"
    with pytest.raises(InvalidOption, match=words):
        marking(the.ignore).in_doubt(older_than=0)


# --- the worker's name


def test_the_name_of_a_worker_is_its_host_its_process_and_its_number() -> None:
    assert worker_name() == f"{socket.gethostname()[:64]}:{os.getpid()}:0"
    the.errands(1)
    names: list[str] = []
    claim = {"claimed": True, "result": worker_name}
    assert_run(marking(lambda row: names.append(row.result), claim=claim)(), processed=1)
    assert names == [worker_name()]


def test_the_name_has_the_number_that_the_supervisor_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_name().endswith(f":{os.getpid()}:0")
    monkeypatch.setattr(worker, "number", 12)
    assert worker_name().endswith(f":{os.getpid()}:12")


class UnreadableError(Exception):
    """Raised while the instance of a row is made."""


# Elsewhere a claim is several statements.
if connection.features.has_select_for_no_key_update:

    def test_a_row_that_cannot_be_loaded_gets_reset(monkeypatch: pytest.MonkeyPatch) -> None:
        rows = the.errands(1)
        bad = left_by_a_dead_worker(attempts=0)
        made = Errand.__init__

        def make(self: Errand, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            if self.pk == bad.pk:
                raise UnreadableError

        with monkeypatch.context() as patch:
            patch.setattr(Errand, "__init__", make)
            report = marking(the.ignore)()
        assert_run(report, processed=1, failed=1)
        assert the.state(rows[0])["done"]
        assert_put_back_with_what_shows_the_death(bad)
