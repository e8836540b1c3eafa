"""The ledger's actions of the command, and what other commands make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import override_settings

from dcl_processor import ledger
from dcl_processor.ledger.models import Record
from dcl_processor.options.worker import this_user, worker_name
from tests.edge import conftest
from tests.edge.manage import Manage, Ran, started
from tests.edge.watchers import parcels
from tests.gates import at_gate
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE, until

_notes, gate, manage = conftest._notes, conftest.gate, conftest.manage

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER, FETCH = "warehouse.deliver", "warehouse.fetch"
ON = {"DJANGO_SETTINGS_MODULE": "tests.ledger.settings"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the warehouse beside the ledger, for commands that run in this process."""
    from tests.ledger.settings import INSTALLED_APPS

    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.ledger.settings")
    with override_settings(INSTALLED_APPS=INSTALLED_APPS):
        yield


def test_pause_and_resume_by_command(manage: Manage) -> None:
    parcels("", "")
    done = manage("pause", DELIVER, "--reason", "mail\tserver", "--until", "2h")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{DELIVER}: paused since ")
    assert " UTC: mail server" in done.out
    # A pause that lasts stays as it is.
    assert manage("pause", DELIVER, "--reason", "other").out == done.out
    # Cron is not to mail: no line, and the exit code is 0.
    assert manage("run", DELIVER) == Ran(0, "", "")
    document = json.loads(manage("run", DELIVER, "--json").out)
    assert (document["stopped"], document["ok"], document["processed"]) == ("paused", True, 0)
    assert manage("resume", DELIVER).out == f"{DELIVER}: not paused\n"
    assert manage("run", DELIVER).out.startswith(f"{DELIVER}: 2 processed")


def test_without_the_ledger_the_actions_say_what_is_missing(manage: Manage) -> None:
    with override_settings(DCL_PROCESSOR_LEDGER=False):
        for action in (["pause", DELIVER], ["resume", DELIVER], ["history"]):
            done = manage(*action)
            assert (done.code, done.out) == (2, "")
            assert "expected 'dcl_processor.ledger' in INSTALLED_APPS, and on, " in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause"], "one of the arguments NAME --all is required"),
        (["pause", DELIVER, "--until", "soon"], "expected a duration up to ten years, such as 90"),
        (["pause", DELIVER, "--until", "0"], "give a time to come, or seconds"),
    ],
)
def test_a_wrong_command_line_ends_with_2(manage: Manage, arguments: list[str], said: str) -> None:
    done = manage(*arguments)
    assert done.code == 2
    assert said in done.err


def test_a_watch_of_a_paused_processor_waits_until_it_is_resumed() -> None:
    parcels("")
    ledger.pause(DELIVER)
    with started("run", DELIVER, "--watch", "0.2", **ON) as process:
        ledger.resume(DELIVER)
        until(Parcel.objects.filter(sent=True).exists, "the parcel to be sent")
        process.terminate()
        assert process.wait(PATIENCE) == 0
    run, *orders = ledger.history(DELIVER)
    assert (run.counts, run.stopped) == ({"processed": 1}, "drained")
    assert [each.action for each in orders] == ["resume", "pause"]


def test_a_worker_that_was_killed_has_left_a_record(gate: Path) -> None:
    parcels("gate")
    with started("run", DELIVER, **ON, GATE=str(gate)) as process:
        at_gate(gate, handlers=1)
        process.kill()
        process.wait(PATIENCE)
    [found] = ledger.history(DELIVER)
    assert (found.by.split(":")[1], found.stopped) == (str(process.pid), "")


def test_history_shows_runs_and_what_operators_have_done(installed: None, manage: Manage) -> None:
    [row, _] = [Errand.objects.create(claimed=True) for _ in range(2)]
    Errand.objects.create()
    assert manage("run", FETCH).code == 0
    done = manage("requeue", FETCH, "--pk", str(row.pk), "--force", "--yes")
    assert done.code == 0, done.err
    manage("pause", FETCH, "--reason", "to look")
    Record.objects.create(
        processor=FETCH,
        action="run",
        by="w:1:0",
        at="2001-01-01T00:00Z",
        seen_at="2001-01-01T00:00Z",
    )
    pause, requeue, run, killed = manage("history", FETCH).out.splitlines()
    assert pause.endswith(f" UTC  {FETCH}  pause by {this_user()}: to look")
    assert requeue.endswith(f" UTC  {FETCH}  requeue by {this_user()}: 1 row ({row.pk})")
    assert f" UTC  {FETCH}  run by {worker_name()}: 1 processed, " in run
    assert run.endswith(" rows/s, drained")
    assert killed.endswith(": nothing, 0.0 rows/s, no end recorded, seen 2001-01-01 00:00:00 UTC")
    documents = json.loads(manage("history", "--json").out)
    assert [each["action"] for each in documents] == ["pause", "requeue", "run", "run"]
    assert (documents[1]["rows"], documents[1]["by"]) == (1, this_user())
