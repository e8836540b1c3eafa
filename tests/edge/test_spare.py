"""The spare of a watch: it takes the place of a worker that dies, and has nothing open before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from django.db import connection

from tests.cleaner import NAME as CLEANER
from tests.edge.manage import at_gate
from tests.edge.test_supervisor import AGAIN, SPARED, handlers
from tests.edge.test_workers import is_running
from tests.edge.watchers import SELDOM, Watcher, parcels, wait_until_sent, watching
from tests.environments import CHECKOUT
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"
TWO = (DELIVER, "--copies", "2", "--verbosity", "2")
#: A process that does not end is killed later than a test waits, and so ends no gate.
NO_KILL = {"EXIT_WITHIN": SELDOM, "PATIENCE": SELDOM}


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """Return the file to which each handler adds its row and its process."""
    path = tmp_path / "audit"
    path.touch()
    return path


@pytest.fixture
def spare_gate(tmp_path: Path) -> Path:
    """Return the folder where the spare waits, as it loads, until the file ``open`` is there."""
    folder = tmp_path / "spare_gate"
    folder.mkdir()
    return folder


def test_the_spare_takes_the_place_of_a_worker_that_is_killed(gate: Path, audit: Path) -> None:
    """It handles rows that come later, and another spare waits behind it."""
    parcels("gate", "gate")
    with watching(*TWO, "--watch", "0.2", GATE=str(gate), AUDIT=str(audit)) as watcher:
        killed, other = at_gate(gate, handlers=2)
        spare = watcher.spare()
        os.kill(killed, signal.SIGKILL)
        assert watcher.says(f"{DELIVER}, copy ", err=True).endswith(f"; {SPARED}")
        (gate / "open").touch()
        wait_until_sent()
        until(lambda: at_work(audit, 2), "the successor")
        assert handlers(audit) == {other, spare}
        following = watcher.spare()
        assert len({killed, other, spare, following}) == 4
        assert watcher.end()[0] == 0
    assert not is_running(following)


def test_a_second_death_in_a_while_waits_although_there_is_a_spare(audit: Path) -> None:
    with watching(*TWO, "--watch", "0.2", AUDIT=str(audit)) as watcher:
        first = watcher.spare()
        until(lambda: at_work(audit, 2), "both workers")
        os.kill(min(handlers(audit)), signal.SIGKILL)
        death = watcher.says(f"{DELIVER}, copy ", err=True)
        second = watcher.spare()
        os.kill(first, signal.SIGKILL)
        again = watcher.says(f"{DELIVER}, copy ", err=True)
        assert death.endswith(SPARED)
        assert re.search(f"{AGAIN}$", again)
        assert death.partition(":")[0] == again.partition(":")[0]
        # Then the spare takes the place.
        until(lambda: at_work(audit, 1) and second in handlers(audit), "the spare")
        assert watcher.end()[0] == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_spare_is_no_death_of_a_worker(
    gate: Path, audit: Path, signum: signal.Signals
) -> None:
    """A spare gets the place of a worker that has died, and ends before it has read the order.

    A new process then takes the place at once, and its death is the second one there.
    """
    with watching(*TWO, "--watch", "0.2", GATE=str(gate), AUDIT=str(audit)) as watcher:
        spare = watcher.spare()
        parcels("gate", "gate")
        killed, other = at_gate(gate, handlers=2)
        os.kill(spare, signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        death = watcher.says(f"{DELIVER}, copy ", err=True)
        assert death.endswith(SPARED)
        # On SIGTERM it goes on with the handler of the signal, before it can read the order.
        os.kill(spare, signum)
        with suppress(ProcessLookupError):  # after SIGKILL it may be gone already
            os.kill(spare, signal.SIGCONT)
        (gate / "open").touch()
        until(lambda: at_work(audit, 2), "the successor")
        (successor,) = handlers(audit) - {other}
        assert successor != spare
        os.kill(successor, signal.SIGKILL)
        again = watcher.says(f"{DELIVER}, copy ", err=True)
        assert again.partition(":")[0] == death.partition(":")[0]
        (wait,) = re.findall(r" again in ([\d.]+) s$", again)
        assert 1 <= float(wait) <= 2
        code, _, err = watcher.end()
    assert (code, err) == (0, "")


def spare_of(watcher: Watcher, spare_gate: Path, *, is_loading: bool) -> int:
    """Return the process of the spare, which is loading or waits for work."""
    (spare,) = at_gate(spare_gate)
    if not is_loading:
        (spare_gate / "open").touch()
        assert watcher.spare() == spare
    return spare


def at_work(audit: Path, number: int) -> bool:
    """Add rows, and return whether so many processes have handled any."""
    parcels(*[""] * 5)
    return len(handlers(audit)) >= number


@pytest.mark.parametrize("variables", [{}, {"ASK_AT_IMPORT": "1"}], ids=["plain", "asks"])
def test_a_spare_has_no_connection(gate: Path, variables: dict[str, str]) -> None:
    """Each of the two workers has one; a module that asks when it is imported leaves none open."""
    parcels("gate", "gate")
    with watching(*TWO, "--watch", SELDOM, GATE=str(gate), **variables) as watcher:
        at_gate(gate, handlers=2)
        spare = psutil.Process(watcher.spare())
        until(lambda: sessions() == 2, "the sessions of the two workers, and no other")
        assert spare.net_connections("all") == []
        (gate / "open").touch()
        assert watcher.end()[0] == 0


def sessions() -> int:
    """Return the number of the other sessions, without the one that empties the tables."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend' AND application_name <> %s",
            [CLEANER],
        )
        (number,) = cursor.fetchone()
    return int(number)


@pytest.mark.parametrize("is_loading", [False, True])
def test_the_spare_ends_when_the_supervisor_is_killed(spare_gate: Path, is_loading: bool) -> None:
    """One that is loading ends when it has loaded."""
    with watching(*TWO, "--watch", SELDOM, SPARE_GATE=str(spare_gate)) as watcher:
        spare = spare_of(watcher, spare_gate, is_loading=is_loading)
        assert is_running(spare)
        watcher.process.kill()
        watcher.process.wait()
        (spare_gate / "open").touch()
        try:
            until(lambda: not is_running(spare), "the spare to end")
        finally:
            with suppress(ProcessLookupError):
                os.kill(spare, signal.SIGKILL)


@pytest.mark.parametrize("is_loading", [False, True])
@pytest.mark.parametrize("how", ["signal", "signal to the group", "rows"])
def test_the_spare_ends_with_the_watch(spare_gate: Path, how: str, is_loading: bool) -> None:
    """It is not killed after a while, and the watch waits for no import."""
    arguments = (*TWO, "--watch", "0.2", "--max-rows", "2")
    with watching(*arguments, **NO_KILL, SPARE_GATE=str(spare_gate)) as watcher:
        spare = spare_of(watcher, spare_gate, is_loading=is_loading)
        match how:
            case "signal":
                watcher.process.send_signal(signal.SIGTERM)
            case "signal to the group":
                os.killpg(watcher.process.pid, signal.SIGTERM)
            case "rows":
                parcels("", "")
        code, _, err = watcher.end(None)
    assert (code, err) == (0, "")
    assert not is_running(spare)


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_second_signal_ends_the_spare_at_once(
    gate: Path, spare_gate: Path, is_loading: bool
) -> None:
    parcels("gate", "gate")
    variables = {**NO_KILL, "GATE": str(gate), "SPARE_GATE": str(spare_gate)}
    with watching(*TWO, "--watch", SELDOM, **variables) as watcher:
        at_gate(gate, handlers=2)
        spare = spare_of(watcher, spare_gate, is_loading=is_loading)
        watcher.process.send_signal(signal.SIGTERM)
        at_gate(gate, "stopping", handlers=2)
        code, _, err = watcher.end(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert err.startswith("CommandError: stopped at once by SIGTERM; ")
    assert not is_running(spare)


#: A child that gets the order to stop at once when its work has ended, and waits for the signal.
LATE = """
import multiprocessing, threading
from dcl_processor.processes import child

control, parent = multiprocessing.Pipe(duplex=False)

class Results(child.Results):
    def send(self, name, event):
        if isinstance(event, child.Ended):
            parent.send(child.STOP_AT_ONCE)
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join()
        super().send(name, event)

child.Results = Results
results, beats = (multiprocessing.Pipe(duplex=False) for _ in range(2))
child.main(lambda stop, send: False, {}, control, results[1], beats[1])
while not isinstance(event := results[0].recv()[1], child.Ended):
    pass
print("sent")
"""


def test_a_signal_behind_the_end_of_the_work_does_not_keep_it_from_being_sent() -> None:
    """Forced: the order to stop at once comes between the end of the work and the last message."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}
    ended = subprocess.run(
        [sys.executable, "-c", LATE],
        cwd=CHECKOUT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sent\n", "")


def test_a_spare_that_is_loading_keeps_no_place(audit: Path, spare_gate: Path) -> None:
    """Neither the successor of a worker nor a stop waits for it."""
    variables = {**NO_KILL, "AUDIT": str(audit), "SPARE_GATE": str(spare_gate)}
    with watching(*TWO, "--watch", "0.2", **variables) as watcher:
        (spare,) = at_gate(spare_gate)
        until(lambda: at_work(audit, 2), "both workers")
        os.kill(min(handlers(audit)), signal.SIGKILL)
        assert re.search(f"{AGAIN}$", watcher.says(f"{DELIVER}, copy ", err=True))
        until(lambda: at_work(audit, 3), "the successor")
        assert spare not in handlers(audit)
        code, _, err = watcher.end()
    assert (code, err) == (0, "")
    assert not is_running(spare)


def test_a_spare_that_is_killed_again_and_again_is_started_later_each_time() -> None:
    """No line says so, as no worker is missing."""
    with watching(*TWO, "--watch", SELDOM) as watcher:
        seen = [watcher.spare()]
        began = time.monotonic()
        for _ in range(3):
            os.kill(seen[-1], signal.SIGKILL)
            seen.append(watcher.spare())
        took = time.monotonic() - began
        code, _, err = watcher.end()
    assert len(set(seen)) == 4
    assert took >= sum(2**n / 2 for n in range(3))
    assert (code, err) == (0, "")
