"""A worker whose handler does not end is killed by its supervisor, and costs the others nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.edge.manage import processors, started
from tests.edge.watchers import parcels, unsent, wait_until_sent, watching
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.hanging.settings"}
DELIVER = "hanging.deliver"
LATE = (
    r"killed: row {} did not leave its handler within 1 s after "
    r"handler_timeout=2 \(since [\d:]+ UTC\); its committed work stays, but is not counted"
)
SILENT = (
    r"killed: it has not moved for [\d.]+ s, (last seen at row {} since [\d:]+ "
    r"UTC, )?handler_timeout=2; its committed work stays, but is not counted"
)
#: What the successor finds.
LEFT = r"died while it handled row {} \(.*\); if still pending, these rows are left to the next run"
#: What a handler does, and why its worker is killed.
HOW = {
    "catches everything": LATE,
    "waits in C without signals": LATE,
    "keeps the GIL": SILENT,
    "is stopped": SILENT,
    "leaves a child": LATE,
}


def handled(audit: Path) -> list[int]:
    return [int(line.split()[0]) for line in audit.read_text().splitlines()]


def pids(audit: Path) -> set[int]:
    return {int(line.split()[1]) for line in audit.read_text().splitlines()}


def marks(errand: Errand) -> tuple[bool, int]:
    errand.refresh_from_db()
    assert not errand.done
    return errand.claimed, errand.attempts


@pytest.mark.filterwarnings("ignore:This process")  # the fork of a handler
@pytest.mark.parametrize("how", HOW)
def test_the_only_worker_is_killed_and_its_successor_handles_the_other_rows(
    audit: Path, how: str
) -> None:
    """The next run handles the row last, too."""
    stuck, *others = parcels(how, "", "", "")
    began = time.monotonic()
    done = processors("run", DELIVER, **SETTINGS, PYTHONWARNINGS="default")
    took = time.monotonic() - began
    assert done.returncode == 1
    assert took >= 3
    *others_said, sentence, summary = done.stderr.splitlines()
    assert re.match(f"{DELIVER}: {HOW[how].format(stuck)}", sentence), done.stderr
    # What it has forked keeps the note locked, and the row.
    named = any(re.search(LEFT.format(stuck), line) for line in others_said)
    assert named == (how != "leaves a child"), done.stderr
    assert summary == f"CommandError: {DELIVER} did not run to the end."
    assert f"{DELIVER}: 3 processed" in done.stdout, (done.stderr, audit.read_text())
    assert unsent() == {stuck}
    assert handled(audit)[:4] == [stuck, *others]
    assert not any(map(psutil.pid_exists, pids(audit)))

    Parcel.objects.filter(pk=stuck).update(note="")
    (first,) = parcels("")
    audit.write_text("")
    again = processors("run", DELIVER, **SETTINGS)
    assert (again.returncode, handled(audit)) == (0, [first, stuck]), (done.stderr, again.stderr)


@pytest.mark.parametrize(
    ("name", "column", "attempts", "said"),
    [
        ("fetch", "claimed_at", 0, "hanging.fetch: 1 row is in doubt: "),
        ("bring", "leased_until", 1, "hanging.bring: row {} failed (attempt 2 of 5, "),
    ],
)
def test_its_row_is_in_doubt_or_taken_over_when_its_lease_has_lapsed(
    audit: Path, name: str, column: str, attempts: int, said: str
) -> None:
    stuck = Errand.objects.create(result="catches everything")
    Errand.objects.create()
    done = processors("run", f"hanging.{name}", **SETTINGS)
    assert done.returncode == 1
    assert re.search(f"hanging.{name}: {LATE.format(stuck.pk)}", done.stderr)
    assert f"hanging.{name}: 1 processed" in done.stdout
    assert (marks(stuck), handled(audit).count(stuck.pk)) == ((not attempts, attempts), 1)
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    Errand.objects.filter(pk=stuck.pk).update(**{column: an_hour_ago}, result="fails")
    again = processors("run", f"hanging.{name}", "--fail-in-doubt", **SETTINGS)
    assert said.format(stuck.pk) in again.stdout + again.stderr
    assert marks(stuck) == (not attempts, 2 * attempts)
    assert (again.returncode, handled(audit).count(stuck.pk)) == (not attempts, 1 + attempts)
    assert len(pids(audit)) == 2 + attempts


@pytest.mark.parametrize(("workers", "who"), [("1", ""), ("2", ", worker [12]")])
def test_in_a_watch_it_is_killed_and_another_takes_its_place(
    audit: Path, workers: str, who: str
) -> None:
    (stuck,) = parcels("catches everything")
    arguments = (DELIVER, "--watch", "0.2", "--workers", workers)
    with watching(*arguments, **SETTINGS) as watcher:
        died = watcher.says(f"{DELIVER}", err=True)
        Parcel.objects.filter(pk=stuck).update(note="")
        parcels("")
        wait_until_sent()
        code, _, _ = watcher.end()
    assert code == 0
    assert re.fullmatch(f"{DELIVER}{who}: {LATE.format(stuck)}; it is started again", died)
    assert len(pids(audit)) > 1


@pytest.mark.filterwarnings("ignore:This process")  # the fork of a handler
def test_a_worker_that_has_died_is_found_although_what_it_forked_keeps_its_pipe_open(
    audit: Path, tmp_path: Path
) -> None:
    """Also without a limit."""
    left = tmp_path / "left"
    (deadly,) = parcels("dies and leaves a child")
    parcels("", "")
    command = ("run", "hanging.deliver_slowly", "--workers", "2")
    variables = {**SETTINGS, "LEFT": str(left), "PYTHONWARNINGS": "default"}
    with started(*command, **variables) as process:
        code = process.wait(PATIENCE)
        os.kill(int(left.read_text()), signal.SIGKILL)  # it was alive until here
        _, err = process.communicate(timeout=PATIENCE)
    assert (code, unsent()) == (1, {deadly})
    assert "killed by SIGKILL; its committed work stays" in err


def test_a_limit_gives_the_only_worker_a_process_of_its_own(audit: Path) -> None:
    parcels("")
    with started("run", DELIVER, **SETTINGS) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert re.fullmatch(rf"{DELIVER}: 1 processed in [\d.]+ s\n", out)
    assert process.pid not in pids(audit)
    idle = processors("run", DELIVER, "--json", **SETTINGS)
    assert json.loads(idle.stdout)["ok"] is True


def test_a_successor_has_the_rest_of_the_limit(audit: Path) -> None:
    parcels("", "catches everything", *[""] * 9)
    done = processors("run", DELIVER, "--limit", "4", **SETTINGS)
    assert done.returncode == 1
    # The worker that was killed had handled one row, and has no outcome for the second.
    assert 3 <= Parcel.objects.filter(sent=True).count() <= 4


def test_after_a_stop_a_worker_that_does_not_end_is_killed(gate: Path, audit: Path) -> None:
    stuck, _ = parcels("catches everything", "")
    with started("run", DELIVER, **SETTINGS) as process:
        until(lambda: handled(audit) == [stuck], "the handler")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    *_, sentence, _ = err.splitlines()
    assert re.match(f"{DELIVER}: {LATE.format(stuck)}", sentence)
    assert handled(audit) == [stuck]


def test_a_watch_is_silent_about_itself_if_asked_to() -> None:
    arguments = ("warehouse.deliver", "--watch", "0.1", "--max-runtime", "0.5", "-v", "0")
    with watching(*arguments) as watcher:
        assert watcher.end(None) == (0, "", "")
    assert watcher.about_itself == []
