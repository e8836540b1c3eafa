"""``processors run --watch``: run after run, until an order to end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.db import connection as db
from django.test.utils import CaptureQueriesContext

from dcl_processor.pending import steady
from dcl_processor.workers import watch as watch_module
from tests.contract.support.clocks import HOUR, Clock
from tests.edge.manage import Install, Manage
from tests.edge.watchers import SELDOM, parcels, unsent, wait_until_sent, watching
from tests.gates import at_gate
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"
WEIGH = "warehouse.weigh"
FAULTY = "tests.faulty.settings"
CLOSED = "expected the resource to open, got ConnectionRefusedError: closed today."


# --- what it does, and what it says


def test_it_finds_rows_that_come_later_and_is_silent_in_between() -> None:
    parcels("", "")
    with watching(DELIVER, "--watch", "0.2") as watcher:
        watcher.says(f"{DELIVER}: 2 processed in ")
        time.sleep(0.5)  # time for something that is not to be said
        parcels("")
        watcher.says(f"{DELIVER}: 1 processed in ")
        assert watcher.end() == (0, "", "")


def test_in_json_each_run_is_a_line() -> None:
    parcels("", "")
    with watching(DELIVER, "--watch", "0.2", "--json", "--limit", "1") as watcher:
        reports = [json.loads(watcher.says("{")) for _ in range(2)]
        assert watcher.end() == (0, "", "")
    assert [(each["name"], each["processed"]) for each in reports] == [(DELIVER, 1)] * 2


def test_several_take_turns() -> None:
    """One whose runs stop at their limit goes on at once, and does not keep others from theirs."""
    parcels(*[""] * 20)
    with watching(WEIGH, DELIVER, "--watch", SELDOM, "--limit", "1") as watcher:
        said = [watcher.says("warehouse.").partition(":")[0] for _ in range(8)]
        assert watcher.end()[0] == 0
    assert {said.count(DELIVER), said.count(WEIGH)} == {4}


# --- its end


@pytest.mark.parametrize(("signum", "workers"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_i10_a_signal_ends_the_wait(interrupts: None, signum: signal.Signals, workers: str) -> None:
    parcels("")
    with watching(DELIVER, "--watch", SELDOM, "--workers", workers) as watcher:
        watcher.says(f"{DELIVER}: 1 processed in ")
        # It has PATIENCE, and would look again in ten minutes.
        assert watcher.end(signum) == (0, "", "")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_i10_the_row_at_hand_is_finished(gate: Path, workers: str) -> None:
    parcels("gate", "gate")
    with watching(DELIVER, "--watch", "--workers", workers, GATE=str(gate)) as watcher:
        at_gate(gate, handlers=int(workers))
        os.killpg(watcher.process.pid, signal.SIGTERM)
        at_gate(gate, "stopping", handlers=int(workers))
        (gate / "open").touch()
        code, out, err = watcher.end(None)
    assert (code, err) == (0, "")
    assert out.count("1 processed") == int(workers)
    assert len(unsent()) == 2 - int(workers)
    assert watcher.about_itself == ["SIGTERM: finishing the rows at hand"]


# --- troubles


def test_a_resource_that_cannot_be_opened_is_told_once_and_when_it_is_over(tmp_path: Path) -> None:
    """In between it is in the health file."""
    parcels("")
    mailbox, health = tmp_path / "mailbox", tmp_path / "health"
    options = ["--watch", "0.1", "--health-file", str(health)]
    faulty = {"DJANGO_SETTINGS_MODULE": FAULTY, "MAILBOX": str(mailbox)}

    def troubles() -> object:
        return json.loads(health.read_text())["troubles"]

    with watching("faulty.post", *options, **faulty) as watcher:
        assert watcher.says("faulty.post: ", err=True) == f"faulty.post: {CLOSED}"
        expected = [{"processor": "faulty.post", "error": CLOSED}]
        until(lambda: troubles() == expected, "the trouble")
        mailbox.touch()
        wait_until_sent()
        until(lambda: troubles() == [], "the end of the trouble")
        watcher.says("faulty.post: 1 processed in ")
        watcher.says("faulty.post: runs again", err=True)
        assert watcher.end() == (0, "", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let the waits of a watch pass at once; see that no connection is kept meanwhile."""
    clock = Clock()

    def wait(_: list[object], seconds: float) -> list[object]:
        assert db.connection is None, "CONN_MAX_AGE is over"
        clock.passed += seconds
        return []

    monkeypatch.setattr(steady, "monotonic", clock.monotonic)
    monkeypatch.setattr(watch_module, "connection", SimpleNamespace(wait=wait))
    return clock


def test_while_nothing_is_pending_each_look_is_one_select(manage: Manage, clock: Clock) -> None:
    with CaptureQueriesContext(db) as sent:
        assert manage("run", DELIVER, "--watch", "60", "--timeout", "600") == (0, "", "")
    assert 10 <= len(sent) <= 14  # a part of each wait is random
    assert all(each["sql"].startswith("SELECT ") for each in sent)


def test_rows_that_fail_are_tried_again_after_the_interval(manage: Manage, clock: Clock) -> None:
    """And not at once, although another row was handled; they do not end the watch."""
    broken, _ = parcels("broken", "")
    done = manage("run", DELIVER, "--watch", "60", "--timeout", "600")
    said = f"{DELIVER}: row {broken} failed: ValueError: no address"
    assert (done.code, {*done.err.splitlines()}) == (0, {said})
    assert 10 <= len(done.err.splitlines()) <= 14
    assert done.out.startswith(f"{DELIVER}: 1 processed, 1 failed in ")


TROUBLED = """
    def closed():
        raise ConnectionRefusedError("closed today")

    @batch_processor(
        pending=Parcel.objects.filter(sent=False), done={"sent": True}, resource=closed
    )
    def post(parcel, _): raise AssertionError

    @batch_processor(
        pending=Parcel.objects.filter(sent=False), done={"sent": True}, max_pending=1
    )
    def mail(parcel): raise AssertionError

    @batch_processor(pending=Parcel.objects.filter(sent=None), done={"sent": True})
    def look(parcel): raise AssertionError
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [("office.post", CLOSED), ("office.mail", "expected at most max_pending=1 pending rows")],
)
def test_an_hour_of_nothing_but_trouble_is_told_again_and_ends_the_watch(
    install: Install, manage: Manage, clock: Clock, name: str, words: str
) -> None:
    """Each ten minutes; a line that is said once is lost, and exit code 0 restarts no service."""
    install("office", TROUBLED)
    parcels("", "")
    began = clock.monotonic()
    done = manage("run", name, "--watch", "--timeout", "7200")
    assert done.code == 1
    *lines, end = done.err.splitlines()
    assert 6 <= len(lines) <= 7  # the tries are up to a minute apart
    assert all(line.startswith(f"{name}: {words}") for line in lines)
    assert end == f"CommandError: {name} did not run to the end."
    assert clock.monotonic() - began >= HOUR
    assert len(unsent()) == 2


def test_a_trouble_of_one_does_not_end_the_watch_of_others(
    install: Install, manage: Manage, clock: Clock
) -> None:
    install("office", TROUBLED)
    parcels("", "")
    names = ("office.post", "office.look")
    done = manage("run", *names, "--watch", "60", "--timeout", "7200")
    assert done.code == 0
    lines = done.err.splitlines()
    assert 11 <= len(lines) <= 13
    assert all(line.startswith("office.post: expected the resource to open") for line in lines)
