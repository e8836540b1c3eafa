"""A process whose handler cannot be interrupted ends itself, and costs the others nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.edge.manage import besides_lifecycle, processors, started
from tests.edge.watchers import parcels, unsent, watching
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
    Parcel.objects.filter(pk=stuck).update(note="")
    assert processors("run", DELIVER, **SETTINGS).returncode == 0
    assert unsent() == set()


def test_a_handler_that_blocks_its_event_loop_ends_the_process_too(audit: Path) -> None:
    stuck = Errand.objects.create(result="catches everything")
    done = processors("run", "hanging.fetch_async", **SETTINGS)
    assert done.returncode == -signal.SIGKILL
    assert re.fullmatch(LATE.format("hanging.fetch_async", stuck.pk), done.stderr.strip())


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


def test_a_watch_is_silent_about_itself_if_asked_to() -> None:
    arguments = ("warehouse.deliver", "--watch", "0.1", "--timeout", "0.5", "-v", "0")
    with watching(*arguments) as watcher:
        assert watcher.end(None) == (0, "", "")
    assert watcher.about_itself == []
