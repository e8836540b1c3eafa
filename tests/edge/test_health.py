"""How a command shows that its workers are alive: the health file, its probe, and systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcl_processor import alive
from dcl_processor.workers.health import Health, Notifier
from tests.edge.manage import Manage, python
from tests.edge.watchers import parcels, wait_until_sent, watching
from tests.gates import at_gate
from tests.waiting import PATIENCE, until

DELIVER = "warehouse.deliver"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "health.json"


def content(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def wait_until_written_again(file: Path) -> None:
    before = file.stat().st_mtime_ns
    until(lambda: file.stat().st_mtime_ns != before, "the file to be written again")


# --- the file of a command


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_names_the_command_and_is_removed_at_the_end(
    gate: Path, file: Path, workers: str
) -> None:
    parcels(*["gate"] * int(workers))
    arguments = (DELIVER, "--watch", "600", "--workers", workers, "--health-file", str(file))
    with watching(*arguments, GATE=str(gate)) as watcher:
        at_gate(gate, handlers=int(workers))
        wait_until_written_again(file)
        document = content(file)
        (gate / "open").touch()
        wait_until_sent()
        code, _, err = watcher.end()
    assert (code, err, file.exists()) == (0, "", False)
    assert (document["pid"], document["processors"]) == (watcher.process.pid, [DELIVER])
    assert document["troubles"] == []
    assert [path.name for path in file.parent.iterdir()] == ["gate"]


@pytest.mark.django_db(transaction=True)
def test_a_process_that_does_not_move_lets_the_file_get_old(file: Path, audit: Path) -> None:
    parcels("keeps the GIL")
    arguments = ("hanging.deliver", "--watch", "0.2", "--health-file", str(file))
    with watching(*arguments, DJANGO_SETTINGS_MODULE="tests.hanging.settings"):
        until(lambda: file.exists() and audit.read_text() != "", "the handler")
        until(lambda: alive.main([str(file), "--max-age", "2"]) == 1, "the file to get old")


@pytest.mark.parametrize("where", ["missing/health", "folder"])
def test_a_file_that_cannot_be_written_is_a_wrong_command_line(
    manage: Manage, tmp_path: Path, where: str
) -> None:
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    ran = manage("run", DELIVER, "--health-file", str(tmp_path / where))
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith("CommandError: expected --health-file to name a file that can be")
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_in_a_folder_that_all_may_write_to_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".health.{os.getpid()}").symlink_to(precious)
    Health(["shop.send"], lambda: False, tmp_path / "health").ready()
    assert precious.read_text() == "mine"
    assert content(tmp_path / "health")["processors"] == ["shop.send"]


# --- the probe


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "dcl_processor.alive", *arguments)


def test_the_probe_is_quick_because_it_imports_no_django(file: Path) -> None:
    file.touch()
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['alive', {str(file)!r}]\n"
        "try:\n    runpy.run_module('dcl_processor.alive', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0, ended.code\n"
        "assert 'django' not in sys.modules\n"
    )
    assert python("-c", code).returncode == 0


def test_the_probe_looks_at_the_age(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.touch()
    assert alive.main([str(file)]) == 0
    assert re.fullmatch(r"alive: written \d\.\d s ago\n", capsys.readouterr().out)
    old = time.time() - 100
    os.utime(file, (old, old))
    assert alive.main([str(file), "--max-age", "200"]) == 0
    capsys.readouterr()
    assert alive.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert re.fullmatch(r"not alive: written 1\d\d\.\d s ago, expected at most 60 s\n", said)


def test_the_exit_codes_of_the_probe(file: Path) -> None:
    missing = probe(str(file))
    assert (missing.returncode, missing.stderr) == (1, "")
    assert missing.stdout == f"not alive: {file}: No such file or directory\n"
    wrong = probe(str(file), "--max-age", "soon")
    assert wrong.returncode == 2
    assert "--max-age: invalid float value: 'soon'" in wrong.stderr
    assert probe().returncode == 2


# --- systemd


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(PATIENCE)
        yield listening


def received(manager: socket.socket) -> list[str]:
    return manager.recv(8_192).decode().splitlines()


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(manager.getsockname()), **more}


def test_its_variables_are_removed(manager: socket.socket) -> None:
    found = environment(manager, WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid()), A="b")
    notifier = Notifier.taken_from(found)
    assert notifier is not None
    assert found == {"A": "b"}
    notifier.send("READY=1", "STOPPING=1")
    assert received(manager) == ["READY=1", "STOPPING=1"]


def test_without_systemd_nothing_is_sent_and_a_lost_one_costs_nothing(tmp_path: Path) -> None:
    assert Notifier.taken_from({}) is None
    Notifier(str(tmp_path / "gone")).send("READY=1")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_is_ready_is_pinged_and_stops(
    manager: socket.socket, gate: Path, workers: str
) -> None:
    parcels(*["gate"] * int(workers))
    arguments = (DELIVER, "--watch", "600", "--workers", workers)
    more = environment(manager, WATCHDOG_USEC="2000000")
    with watching(*arguments, GATE=str(gate), **more) as watcher:
        assert received(manager) == ["READY=1"]
        at_gate(gate, handlers=int(workers))
        while received(manager) != ["WATCHDOG=1"]:
            pass
        watcher.process.send_signal(signal.SIGTERM)
        while received(manager)[0] != "STOPPING=1":
            pass
        (gate / "open").touch()
        assert watcher.end(None)[0] == 0


@pytest.mark.django_db(transaction=True)
def test_a_service_is_ready_although_its_database_cannot_be_reached(
    manager: socket.socket, file: Path
) -> None:
    """Systemd would start it again and again; the file says why it waits."""
    down = {"DATABASE_URL": "postgres://nothing@127.0.0.1:1/none"}
    arguments = (DELIVER, "--watch", "1", "--health-file", str(file))
    with watching(*arguments, **environment(manager), **down) as watcher:
        assert received(manager) == ["READY=1"]
        until(lambda: content(file)["troubles"], "the trouble in the file")
        [trouble] = content(file)["troubles"]
        assert trouble["processor"] == DELIVER
        assert trouble["error"].startswith("the database reported: ")
        assert watcher.end()[0] == 0
