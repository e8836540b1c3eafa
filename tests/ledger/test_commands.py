"""The ledger's actions of the command, and what its workers make of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings
from django.utils import timezone

import dcl_processor.ledger as api
from dcl_processor.admin_page import ledger as page
from dcl_processor.contrib import prometheus
from dcl_processor.ledger import records
from dcl_processor.ledger.models import Control, RecordedRun
from dcl_processor.management import controlling
from dcl_processor.operator import registry
from dcl_processor.options.worker import this_user
from tests.contract.support import errands as the
from tests.edge.conftest import gate, manage  # noqa: F401  # fixtures
from tests.edge.manage import Manage, Ran, at_gate, started
from tests.edge.watchers import SELDOM, Watcher, parcels
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER, FETCH = "warehouse.deliver", "warehouse.fetch"
ON = {"DJANGO_SETTINGS_MODULE": "tests.ledger.settings"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the warehouse and the ledger, for commands that run in this process."""
    from tests.ledger.settings import INSTALLED_APPS

    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.ledger.settings")
    with override_settings(INSTALLED_APPS=INSTALLED_APPS):
        yield


@contextmanager
def watching(*arguments: str, **variables: str) -> Iterator[Watcher]:
    with started("run", DELIVER, "--watch", *arguments, **ON, **variables) as process:
        yield Watcher(process)


def sent() -> int:
    return Parcel.objects.filter(sent=True).count()


def test_pause_and_resume_by_command(manage: Manage) -> None:  # noqa: F811  # the fixture
    parcels("", "")
    done = manage("pause", DELIVER, "--reason", "mail\tserver", "--until", "2h")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{DELIVER}: paused since ")
    assert " UTC: mail server" in done.out
    again = manage("pause", DELIVER)
    assert again.code == 0
    assert again.out.startswith(f"{DELIVER}: nothing changed: it was paused since ")
    # Cron is not to mail: no line, and the exit code is 0.
    assert manage("run", DELIVER) == Ran(0, "", "")
    document = json.loads(manage("run", DELIVER, "--json").out)
    assert (document["stopped"], document["ok"], document["processed"]) == ("paused", True, 0)
    assert "not running     paused since " in manage("status", DELIVER).out
    assert manage("resume", DELIVER).out == f"{DELIVER}: resumed\n"
    assert manage("resume", DELIVER).out == f"{DELIVER}: nothing changed: it was not paused\n"
    assert manage("run", DELIVER).out.startswith(f"{DELIVER}: 2 processed")


@contextmanager
def locked() -> Iterator[None]:
    """Keep the records locked by another session."""
    held, go_on = threading.Event(), threading.Event()

    def forgotten() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {RecordedRun._meta.db_table}")
            held.set()
            the.wait(go_on)

    with the.meanwhile(forgotten):
        the.wait(held)
        try:
            yield
        finally:
            go_on.set()


def test_history_does_not_wait_without_end_for_a_table_that_another_session_has_locked(
    manage: Manage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controlling, "READ_WITHIN", 0.2)
    with locked():
        history = manage("history", DELIVER)
        paused = manage("pause", DELIVER)
    expected = "expected the ledger's tables to answer within 0.2 s, got no answer; has another "
    for done in (history, paused):
        assert (done.code, done.out) == (3, "")
        assert expected in done.err
    assert f"The order was given for {DELIVER}." in paused.err
    assert api.state(DELIVER).phase == "paused"


def test_the_page_of_the_admin_does_not_wait_without_end_for_a_ledger_that_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "READ_WITHIN", 0.2)
    processor = the.transactional(the.ignore, name="shop.locked")
    with locked():
        assert page.controls([processor])[processor.name].state.startswith("not known: ")
    assert page.controls([processor])[processor.name].state == "running"


def test_a_monitor_finds_a_pause_that_was_forgotten(manage: Manage) -> None:  # noqa: F811
    assert manage("status", DELIVER, "--fail-if", "paused>1d").code == 0
    manage("pause", DELIVER)
    assert manage("status", DELIVER, "--fail-if", "paused>1d").code == 0
    Control.objects.update(paused_at="2001-01-01T00:00:00Z")
    done = manage("status", DELIVER, "--fail-if", "paused>1d")
    assert done.code == 1
    assert f"{DELIVER}: paused>1d, got 2001-01-01" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause"], "expected names of processors or --all, got neither"),
        (["pause", DELIVER, "--until", "soon"], "expected a duration such as 2h or a time"),
        (["pause", DELIVER, "--until", "2030-02-31"], "expected a duration such as 2h or a time"),
        (["pause", DELIVER, "--until", "2020-01-31T06:00"], "expected a time to come, got '2020-"),
        (["history", "--limit", "0"], "expected a number from 1 to 10000"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    manage: Manage,  # noqa: F811
    arguments: list[str],
    said: str,
) -> None:
    done = manage(*arguments)
    assert done.code == 2
    assert said in done.err


def test_a_watch_of_a_paused_processor_waits_until_it_is_resumed() -> None:
    parcels("")
    api.pause(DELIVER)
    with watching(SELDOM) as watcher:
        until(lambda: bool(watcher.about_itself), "the watch to begin")
        assert sent() == 0
        api.resume(DELIVER)
        watcher.says(f"{DELIVER}: 1 processed")
        assert watcher.end() == (0, "", "")
    (row,) = _records()
    assert (row.kind, row.counts["processed"], row.at_work) == ("watch", 1, False)
    assert row.finished_at is not None


def test_a_command_whose_workers_were_killed_has_not_drained_the_rows(
    gate: Path,  # noqa: F811
) -> None:
    parcels("gate", "gate")
    with started("run", DELIVER, "--workers", "2", **ON, GATE=str(gate)) as process:
        for pid in at_gate(gate, handlers=2):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == 1
    (found,) = api.history(DELIVER)
    assert (found.state, found.stopped) == ("finished", "failures")
    assert found.error.startswith("killed by SIGKILL")


def _records() -> list[RecordedRun]:
    until(RecordedRun.objects.exists, "a record")
    return list(RecordedRun.objects.all())


def test_history_shows_what_operators_have_done_to_rows(
    installed: None,
    manage: Manage,  # noqa: F811
) -> None:
    RecordedRun.objects.create(
        processor=FETCH,
        kind="run",
        host="shop1",
        pid=1,
        started_at=timezone.now() - timedelta(hours=1),
        heartbeat_at=timezone.now(),
    )
    rows = [Errand.objects.create(done=True) for _ in range(2)]
    done = manage("requeue", FETCH, "--pk", *(str(row.pk) for row in rows), "--force", "--yes")
    assert done.code == 0, done.err
    newest, run = manage("history", FETCH).out.splitlines()
    keys = f"{rows[0].pk}, {rows[1].pk}"
    assert newest.endswith(f"  {FETCH}  requeue by {this_user()}: 2 rows ({keys})")
    assert f"  {FETCH}  run on shop1 (1): " in run
    documents = json.loads(manage("history", "--json").out)
    assert [each.get("action") for each in documents] == ["requeue", None]
    assert (documents[0]["rows"], documents[0]["by"]) == (2, this_user())
    assert len(json.loads(manage("history", "--json", "--limit", "1").out)) == 1


def test_an_action_is_done_without_its_record_too(
    installed: None,
    manage: Manage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = Errand.objects.create(claimed=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("no table")

    monkeypatch.setattr(records, "add_action", refuse)
    done = manage("requeue", FETCH, "--pk", str(row.pk), "--force", "--yes")
    assert done.code == 0, done.err
    row.refresh_from_db()
    assert not row.claimed
    assert f"{FETCH}: the ledger has no record of this requeue: no table" in caplog.text


def test_a_pause_and_lost_runs_are_gauges_and_conditions(
    installed: None,
    manage: Manage,  # noqa: F811
) -> None:
    api.pause(DELIVER)
    Control.objects.update(paused_at=timezone.now() - timedelta(days=2))
    for minutes in (2, 0):
        RecordedRun.objects.create(
            processor=DELIVER,
            kind="run",
            host="a",
            pid=1,
            started_at=timezone.now() - timedelta(hours=1),
            heartbeat_at=timezone.now() - timedelta(minutes=minutes),
        )
    gauges = prometheus.Gauges(lambda: registry.get([DELIVER]))
    found = {each.name: each.samples[0].value for each in gauges.collect() if each.samples}
    assert 172_800 <= found["dcl_processor_paused_seconds"] < 172_900
    assert found["dcl_processor_lost_runs"] == 1.0
    shown = manage("status", DELIVER)
    assert "\n  lost runs       1, see processors history\n" in shown.out
    red = manage("status", DELIVER, "--fail-if", "lost>0")
    assert (red.code, f"{DELIVER}: lost>0, got 1" in red.err) == (1, True)


def test_list_shows_what_is_paused(installed: None, manage: Manage) -> None:  # noqa: F811
    parcels("")
    api.pause(DELIVER)
    Errand.objects.create(claimed=True, claimed_at=timezone.now() - timedelta(hours=1))
    api.pause(FETCH)
    found = {each["name"]: each["state"] for each in json.loads(manage("list", "--json").out)}
    assert found[DELIVER] == ["paused"]
    assert found[FETCH] == ["paused", "in doubt"]
    assert found["warehouse.weigh"] == ["waiting"]
    assert f"  paused, in doubt  {FETCH} " in manage("list").out
