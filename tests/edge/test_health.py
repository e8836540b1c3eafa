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
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health, write_file
from dcl_processor.processes.news import AtWork, Beat, Worker
from dcl_processor.processes.visible import Notifier
from tests.edge.manage import Manage, at_gate, python
from tests.edge.watchers import parcels, wait_until_sent, watching
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
def test_it_names_the_rows_at_hand_and_is_removed_at_the_end(
    gate: Path, file: Path, workers: str
) -> None:
    number = int(workers)
    rows = parcels(*["gate"] * number)
    arguments = (DELIVER, "--watch", "600", "--workers", workers, "--health-file", str(file))
    with watching(*arguments, GATE=str(gate)) as watcher:
        pids = at_gate(gate, handlers=number)

        def all_named() -> bool:
            return (
                file.exists() and sum("rows" in each for each in content(file)["workers"]) == number
            )

        until(all_named, "the rows at hand")
        document = content(file)
        wait_until_written_again(file)
        (gate / "open").touch()
        wait_until_sent()
        until(lambda: all(each["state"] == "waits" for each in content(file)["workers"]), "the end")
        code, _, err = watcher.end()
    assert (code, err, file.exists()) == (0, "", False)
    assert (document["pid"], document["processors"]) == (watcher.process.pid, [DELIVER])
    shown = document["workers"]
    assert sorted(each["pid"] for each in shown) == pids
    assert sorted(int(row) for each in shown for row in each["rows"]) == rows
    assert {each["processor"] for each in shown} == {DELIVER}
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d UTC", each["since"]) for each in shown)
    assert [path.name for path in file.parent.iterdir()] == ["gate"]


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


def test_a_disk_that_is_full_is_logged_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    health = Health([DELIVER], Stop(), folder / "health")
    health.ready()
    folder.rename(tmp_path / "elsewhere")
    for _ in range(3):
        health.seen([])
    assert len(caplog.records) == 1
    assert "health cannot be written, and gets old although" in caplog.text
    (tmp_path / "elsewhere").rename(folder)
    (folder / "health").unlink()
    health.seen([])
    assert content(folder / "health")["processors"] == [DELIVER]
    folder.rename(tmp_path / "elsewhere")
    health.seen([])
    assert len(caplog.records) == 2
    health.close()


def test_a_link_in_a_folder_that_all_may_write_to_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".health.{os.getpid()}").symlink_to(precious)
    write_file(tmp_path / "health", {"n": 1})
    assert precious.read_text() == "mine"
    assert content(tmp_path / "health") == {"n": 1}


# --- the probe


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "dcl_processor.alive", *arguments)


def test_the_probe_is_quick_because_it_imports_no_django(file: Path) -> None:
    write_file(file, {"pid": 4, "workers": []})
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['alive', {str(file)!r}]\n"
        "try:\n    runpy.run_module('dcl_processor.alive', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0, ended.code\n"
        "assert 'django' not in sys.modules\n"
    )
    assert python("-c", code).returncode == 0


def test_the_probe_looks_at_the_age(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(file, {})
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


def test_a_file_from_the_future_is_old(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock was set back, and nothing has been written since."""
    write_file(file, {"pid": 4, "workers": []})
    later = time.time() + 3_600
    os.utime(file, (later, later))
    assert alive.main([str(file)]) == 1
    assert capsys.readouterr().out.startswith("not alive: written ")


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
    assert (notifier.watchdog, found) == (3.0, {"A": "b"})
    notifier.send("READY=1", "STATUS=x")
    assert received(manager) == ["READY=1", "STATUS=x"]


@pytest.mark.parametrize(
    "more", [{"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {}]
)
def test_a_watchdog_of_another_process_is_none(
    manager: socket.socket, more: dict[str, str]
) -> None:
    found = environment(manager, **more)
    notifier = Notifier.taken_from(found)
    assert notifier is not None
    assert (notifier.watchdog, found) == (None, {})


def test_an_address_may_be_abstract() -> None:
    name = f"dcl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        listening.settimeout(PATIENCE)
        notifier = Notifier.taken_from({"NOTIFY_SOCKET": f"@{name}"})
        assert notifier is not None
        notifier.send("READY=1")
        assert listening.recv(100) == b"READY=1"


def test_without_systemd_nothing_is_sent_and_a_lost_one_costs_nothing(tmp_path: Path) -> None:
    assert Notifier.taken_from({"NOTIFY_SOCKET": "vsock:2:1"}) is None
    assert Notifier.taken_from({}) is None
    Notifier(str(tmp_path / "gone")).send("READY=1")


@pytest.mark.django_db(transaction=True)
def test_a_service_is_ready_is_pinged_and_stops(manager: socket.socket, gate: Path) -> None:
    (row,) = parcels("gate")
    arguments = (DELIVER, "--watch", "600")
    more = environment(manager, WATCHDOG_USEC="2000000")
    with watching(*arguments, GATE=str(gate), **more) as watcher:
        assert received(manager) == ["READY=1", f"STATUS=starting {DELIVER}"]
        at_gate(gate)
        said: list[str] = []
        while not any(f"oldest: {DELIVER}, row {row} since" in line for line in said):
            said = received(manager)
        while "WATCHDOG=1" not in said:
            said = received(manager)
        variables = Path(f"/proc/{watcher.process.pid}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" in variables  # as it was when the process began
        watcher.process.send_signal(signal.SIGTERM)
        while "STOPPING=1" not in said:
            said = received(manager)
        # Its handler has no limit, so no time can be asked for.
        assert not any(line.startswith("EXTEND") for line in said)
        (gate / "open").touch()
        assert watcher.end(None)[0] == 0


@pytest.mark.django_db(transaction=True)
def test_a_service_is_ready_although_its_database_cannot_be_reached(manager: socket.socket) -> None:
    """Systemd would start it again and again."""
    down = {"DATABASE_URL": "postgres://nothing@127.0.0.1:1/none"}
    with watching(DELIVER, "--watch", "1", **environment(manager), **down) as watcher:
        assert received(manager)[0] == "READY=1"
        while "; waiting: expected the database 'default' to answer" not in received(manager)[-1]:
            pass
        assert watcher.end()[0] == 0


def test_only_while_all_are_alive_it_is_written_and_pinged(
    manager: socket.socket, file: Path
) -> None:
    notifier = Notifier(str(manager.getsockname()), 0.002)
    health = Health(["shop.send"], Stop(), file, notifier)
    well, sick = Worker(1, 41, "waits", None, True), Worker(2, 42, "does not move", None, False)
    health.seen([well, sick])
    assert received(manager) == ["STATUS=0 of 2 workers at work; not alive: worker 2"]
    assert not file.exists()
    health.seen([well])
    assert received(manager) == ["STATUS=0 of 1 workers at work", "WATCHDOG=1"]
    assert file.exists()


@pytest.mark.parametrize("is_overdue", [True, False])
def test_a_process_that_works_itself_is_alive_until_its_handler_does_not_end(
    file: Path, is_overdue: bool
) -> None:
    health = Health(["p"], Stop(), file)
    health.beat(Beat(AtWork("p", ("17",), 1, time.monotonic(), 60.0), is_overdue))
    assert file.exists() is not is_overdue


def test_a_stopped_service_asks_for_no_more_time_than_its_limits_allow(
    manager: socket.socket,
) -> None:
    stop = Stop()
    stop.set()
    notifier, now = Notifier(str(manager.getsockname()), 0.002), time.monotonic()
    health = Health(["p"], stop, None, notifier)
    limited = AtWork("p", ("17",), 1, now - 5, 60.0)
    health.seen([Worker(1, 41, "works", limited, True)])
    *_, stopping, extend, _ = received(manager)
    assert stopping == "STOPPING=1"
    assert 70 < int(extend.partition("=")[2]) / 1e6 <= 75
    over = AtWork("p", ("17",), 1, now - 80, 60.0)
    health.seen([Worker(1, 41, "works", over, False)])
    assert not any(line.startswith("EXTEND") for line in received(manager))
    health.close()
