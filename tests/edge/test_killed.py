"""A process whose handler cannot be interrupted ends itself, and costs the others nothing."""

from __future__ import annotations

import os
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.edge.manage import besides_lifecycle, processors, started
from tests.edge.watchers import parcels, unsent, wait_until_sent, watching
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.hanging.settings", "PYTHONWARNINGS": "default"}
DELIVER = "hanging.deliver"
LATE = (
    r"{}: row {} did not leave its handler within 1 s after handler_timeout=2; "
    r"process \d+ ends itself"
)
#: What the next run finds.
LEFT = r"{}: row {} was at work when its process died; it is handled last, and alone"


def handled(audit: Path) -> list[int]:
    return [int(line.split()[0]) for line in audit.read_text().splitlines()]


def pids(audit: Path) -> set[int]:
    return {int(line.split()[1]) for line in audit.read_text().splitlines()}


def marks(errand: Errand) -> tuple[bool, int]:
    errand.refresh_from_db()
    assert not errand.done
    return errand.claimed, errand.attempts


@pytest.mark.parametrize("how", ["catches everything", "waits in C without signals"])
def test_the_process_ends_with_a_line_and_the_next_run_handles_the_row_last(
    audit: Path, how: str
) -> None:
    stuck, *others = parcels(how, "", "", "")
    done = processors("run", DELIVER, **SETTINGS)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert re.fullmatch(LATE.format(DELIVER, stuck), done.stderr.strip())
    assert unsent() == {stuck, *others}
    again = processors("run", DELIVER, **SETTINGS)
    assert again.returncode == -signal.SIGKILL
    said, line = again.stderr.splitlines()
    assert re.fullmatch(LEFT.format(DELIVER, stuck), said)
    assert re.fullmatch(LATE.format(DELIVER, stuck), line)
    assert handled(audit) == [stuck, *others, stuck]
    assert not any(map(psutil.pid_exists, pids(audit)))
    Parcel.objects.filter(pk=stuck).update(note="")
    assert processors("run", DELIVER, **SETTINGS).returncode == 0
    assert unsent() == set()


@pytest.mark.parametrize(
    ("name", "column", "attempts", "said"),
    [
        ("fetch", "claimed_at", 0, ""),
        ("bring", "leased_until", 1, "hanging.bring: row {} failed (attempt 2 of 5, "),
        ("fetch_async", None, 0, ""),
    ],
)
def test_its_row_is_in_doubt_or_taken_over_when_its_lease_has_lapsed(
    audit: Path, name: str, column: str | None, attempts: int, said: str
) -> None:
    stuck = Errand.objects.create(result="catches everything")
    done = processors("run", f"hanging.{name}", **SETTINGS)
    assert done.returncode == -signal.SIGKILL
    assert re.fullmatch(LATE.format(f"hanging.{name}", stuck.pk), done.stderr.strip())
    if column is None:
        stuck.refresh_from_db()
        assert stuck.done  # at most once, and without a claim
        return
    assert (marks(stuck), handled(audit)) == ((not attempts, attempts), [stuck.pk])
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    Errand.objects.filter(pk=stuck.pk).update(**{column: an_hour_ago}, result="fails")
    again = processors("run", f"hanging.{name}", **SETTINGS)
    assert said.format(stuck.pk) in again.stdout + again.stderr
    assert marks(stuck) == (not attempts, 2 * attempts)
    assert (again.returncode, handled(audit).count(stuck.pk)) == (0, 1 + attempts)


def test_in_a_watch_of_several_it_has_a_successor(audit: Path) -> None:
    (stuck,) = parcels("catches everything")
    with watching(DELIVER, "--watch", "0.2", "--workers", "2", **SETTINGS) as watcher:
        line = watcher.says(f"{DELIVER}: row", err=True)
        died = watcher.says(f"{DELIVER}, worker ", err=True)
        Parcel.objects.filter(pk=stuck).update(note="")
        parcels("")
        wait_until_sent()
        code, _, _ = watcher.end()
    assert code == 0
    assert re.fullmatch(LATE.format(DELIVER, stuck), line)
    assert ": killed by SIGKILL; its committed work stays; it is started again in " in died
    assert len(pids(audit)) > 1


def test_a_worker_that_has_died_is_found_although_what_it_forked_lives(
    audit: Path, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    (deadly,) = parcels("dies and leaves a child")
    parcels("", "")
    command = ("run", "hanging.deliver_slowly", "--workers", "2")
    with started(*command, **SETTINGS, LEFT=str(left)) as process:
        code = process.wait(PATIENCE)
        os.kill(int(left.read_text()), signal.SIGKILL)  # it was alive until here
        process.communicate(timeout=PATIENCE)
    assert code == 128 + signal.SIGKILL
    assert deadly in unsent()


def test_after_a_stop_a_process_whose_handler_does_not_end_ends_itself(audit: Path) -> None:
    stuck, _ = parcels("catches everything", "")
    with started("run", DELIVER, **SETTINGS) as process:
        until(lambda: handled(audit) == [stuck], "the handler")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(LATE.format(DELIVER, stuck), besides_lifecycle(err).strip())
    assert handled(audit) == [stuck]


def test_a_second_signal_kills_a_handler_that_catches_everything(
    interrupts: None, audit: Path
) -> None:
    (stuck,) = parcels("catches everything")
    with started("run", "hanging.deliver_slowly", **SETTINGS) as process:
        until(lambda: handled(audit) == [stuck], "the handler")
        process.send_signal(signal.SIGTERM)
        until(lambda: not catches(process.pid, signal.SIGINT), "the first signal to be taken")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
    assert unsent() == {stuck}


def catches(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = re.findall(r"^SigCgt:\s+(\w+)", status, re.MULTILINE)
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_a_watch_is_silent_about_itself_if_asked_to() -> None:
    arguments = ("warehouse.deliver", "--watch", "0.1", "--timeout", "0.5", "-v", "0")
    with watching(*arguments) as watcher:
        assert watcher.end(None) == (0, "", "")
    assert watcher.about_itself == []
