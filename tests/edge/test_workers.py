"""Several workers on one machine: processes that share the rows, whatever becomes of one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from dcl_processor.workers.stopping import polite_stop
from tests.edge.manage import processors, python, started
from tests.edge.watchers import parcels, unsent, wait_until_sent, watching
from tests.gates import at_gate
from tests.models import Parcel
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"


def handled(audit: Path) -> list[tuple[int, int]]:
    lines = (line.split() for line in audit.read_text().splitlines())
    return [(int(pk), int(pid)) for pk, pid in lines]


def free() -> int:
    """Return how many rows no session has locked."""
    with transaction.atomic():
        return len(Parcel.objects.select_for_update(skip_locked=True))


#: It makes the settings itself, and has no guard.
PREPARING = """
import os, sys
from django.conf import settings
from django.core.management import execute_from_command_line

os.environ["AUDIT"] = "audit"
from tests.warehouse import settings as warehouse

os.environ.pop("DJANGO_SETTINGS_MODULE", None)
settings.configure(**{name: value for name, value in vars(warehouse).items() if name.isupper()})
execute_from_command_line()
"""


def test_a_worker_runs_all_of_the_program_that_runs_the_command(tmp_path: Path) -> None:
    """Django's settings, drivers and variables may be prepared there, and nowhere else."""
    rows = Parcel.objects.bulk_create(Parcel() for _ in range(3))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "program.py").write_text(PREPARING)
    ended = python("site/program.py", "processors", "run", DELIVER, "--workers", "2", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    calls = handled(tmp_path / "audit")
    assert sorted(pk for pk, _ in calls) == [row.pk for row in rows]


def test_a_call_from_another_program_cannot_be_started_again(installed: None) -> None:
    with pytest.raises(CommandError, match=r"expected manage\.py processors, which can be started"):
        call_command("processors", "run", DELIVER, workers=2)


# --- sharing


def test_workers_handle_each_row_once_and_each_has_a_report(audit: Path) -> None:
    """The row that fails is tried by each worker, and ends the command with 1."""
    rows = Parcel.objects.bulk_create(Parcel(note="broken" if n == 3 else "") for n in range(200))
    done = processors("run", DELIVER, "--workers", "2", "--json")
    assert Counter(pk for pk, _ in handled(audit)) == Counter(
        row.pk for row in rows if not row.note
    )
    assert unsent() == {rows[3].pk}
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["worker"] for each in reports) == [1, 2]
    assert sum(each["processed"] for each in reports) == 199
    shares = Counter(pid for _, pid in handled(audit))
    assert sorted(shares.values()) == sorted(
        each["processed"] for each in reports if each["processed"]
    )
    codes = {each["worker"]: 1 for each in reports if each["failed"]}
    said = ", ".join(f"worker {number} with 1" for number in sorted(codes))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"CommandError: ended with an exit code: {said}."


def test_a_worker_that_is_killed_frees_its_slot_at_once(gate: Path, audit: Path) -> None:
    """Another command leaves meanwhile, and one that starts afterwards gets the slot."""
    notes = ["alone, gate", "alone, gate", "alone", "alone"]
    Parcel.objects.bulk_create(Parcel(note=note) for note in notes)
    alone = ("run", "warehouse.deliver_alone")
    with started(*alone, GATE=str(gate)) as killed:
        at_gate(gate)
        over = processors(*alone, "--json")
        assert (over.returncode, json.loads(over.stdout)["stopped"]) == (0, "busy")
        assert handled(audit) == []
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: free() == 4, "the row of the process that was killed")
        (gate / "open").touch()
        report = json.loads(processors(*alone, "--json", GATE=str(gate)).stdout)
    assert (report["processed"], report["stopped"]) == (4, "drained")
    assert killed.pid not in {pid for _, pid in handled(audit)}
    assert len(unsent()) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_sessions_of_a_worker_have_its_name(gate: Path, workers: int) -> None:
    parcels("gate", "gate", "")
    with started("run", DELIVER, "--workers", str(workers), GATE=str(gate)) as process:
        at_gate(gate, handlers=workers)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT application_name FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE '%%dcl %%'"
            )
            found = {name for (name,) in cursor.fetchall()}
        (gate / "open").touch()
        process.communicate(timeout=PATIENCE)
    numbers = [f" {number}/{workers}" if workers > 1 else "" for number in range(1, workers + 1)]
    assert found == {f"dcl {DELIVER}{number} {socket.gethostname()[:8]}" for number in numbers}


# --- death and signals


def test_a_worker_that_is_killed_costs_the_others_nothing(gate: Path, audit: Path) -> None:
    """Its exit code is that of the command; without a watch it has no successor."""
    parcels("gate", "gate")
    with started("run", DELIVER, "--workers", "2", GATE=str(gate)) as process:
        killed, other = at_gate(gate, handlers=2)
        os.kill(killed, signal.SIGKILL)
        (gate / "open").touch()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGKILL
    assert {pid for _, pid in handled(audit)} == {other}
    died, end = err.splitlines()
    [number] = re.findall(
        rf"{DELIVER}, worker ([12]): killed by SIGKILL; its committed work stays", died
    )
    assert end == f"CommandError: ended with an exit code: worker {number} with 137."


def test_workers_finish_their_rows_and_end_when_the_parent_is_killed(
    gate: Path, audit: Path
) -> None:
    Parcel.objects.bulk_create(Parcel(note="gate") for _ in range(4))
    with started("run", DELIVER, "--workers", "2", GATE=str(gate)) as process:
        workers = at_gate(gate, handlers=2)
        process.kill()
        at_gate(gate, "stopping", handlers=2)
        (gate / "open").touch()
        until(lambda: not any(is_running(pid) for pid in workers), "the workers to end")
    assert len(handled(audit)) == 2
    assert len(unsent()) == 2


def test_a_second_signal_kills_the_workers_in_their_handlers(gate: Path, audit: Path) -> None:
    Parcel.objects.bulk_create(Parcel(note="gate") for _ in range(4))
    with started("run", DELIVER, "--workers", "2", GATE=str(gate)) as process:
        workers = at_gate(gate, handlers=2)
        process.send_signal(signal.SIGTERM)
        at_gate(gate, "stopping", handlers=2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
        until(lambda: not any(is_running(pid) for pid in workers), "the workers to end")
    assert handled(audit) == []
    assert len(unsent()) == 4


def is_running(pid: int) -> bool:
    # One whose parent has not waited for it is a zombie, and has ended.
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


# --- the polite stop itself


def test_a_signal_ignored_by_whoever_started_us_stays_ignored(interrupts: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with polite_stop(str) as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# --- workers of a watch: one that dies is started again, and costs the others nothing


@pytest.mark.parametrize(("note", "how"), [("kill", "SIGKILL"), ("crash", "SIGSEGV")])
def test_in_a_watch_a_worker_that_dies_is_named_and_another_takes_its_place(
    audit: Path, note: str, how: str
) -> None:
    """The row that kills each worker that takes it does so again, later each time."""
    (deadly,) = parcels(note)
    died = (
        rf"{DELIVER}, worker [12]: killed by {how}; its committed work stays; it is started again"
        r" in \d+\.\d s"
    )
    with watching(DELIVER, "--watch", "0.2", "--workers", "2") as watcher:
        deaths = [watcher.says(f"{DELIVER}, worker ", err=True) for _ in range(3)]
        Parcel.objects.filter(pk=deadly).update(note="")
        parcels(*[""] * 4)
        wait_until_sent()
        code, _, _ = watcher.end()
    assert code == 0
    assert all(re.fullmatch(died, line) for line in deaths), deaths


def test_a_watch_ends_though_a_worker_waits_to_be_started_again() -> None:
    parcels("exit at once")
    died = "ended with exit code 9 and without a report"
    with watching(DELIVER, "--watch", "0.1", "--workers", "2") as watcher:
        for _ in range(4):
            assert died in watcher.says(f"{DELIVER}, worker ", err=True)
        code, _, _ = watcher.end()
    assert code in (0, 9)
