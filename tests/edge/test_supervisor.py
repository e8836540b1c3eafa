"""Copies of a watch: one that dies is started again, and costs the others nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dcl_processor.diagnosis import Trouble
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.news import Died
from dcl_processor.processes.supervisor import LIVED_LONG, Supervisor
from dcl_processor.watch.polling import BACKOFF
from tests.edge.watchers import parcels, wait_until_sent, watching
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"
DIED = "{}, worker [12]: killed by {}; its committed work stays, but is not counted; "
AGAIN = r"it is started again( in \d+\.\d s)?"


def handlers(audit: Path) -> set[int]:
    return {int(line.split()[1]) for line in audit.read_text().splitlines()}


@pytest.mark.parametrize(("note", "how"), [("kill", "SIGKILL"), ("crash", "SIGSEGV")])
def test_a_copy_that_dies_is_named_and_another_takes_its_place(
    audit: Path, note: str, how: str
) -> None:
    """The row that kills each worker that takes it does so again, later each time."""
    (deadly,) = parcels(note)
    with watching(DELIVER, "--watch", "0.2", "--workers", "2") as watcher:
        deaths = [watcher.says(f"{DELIVER}, worker ", err=True) for _ in range(3)]
        Parcel.objects.filter(pk=deadly).update(note="")
        wait_until_sent()
        parcels(*[""] * 4)
        wait_until_sent()
        code, _, _ = watcher.end()
    assert code == 0
    died = DIED.format(DELIVER, how) + AGAIN
    assert all(re.fullmatch(died, line) for line in deaths), deaths
    assert handlers(audit)


def test_it_ends_though_a_copy_waits_to_be_started_again() -> None:
    parcels("kill")
    with watching(DELIVER, "--watch", "0.1", "--workers", "2") as watcher:
        for _ in range(5):
            watcher.says(f"{DELIVER}, worker ", err=True)
        code, _, _ = watcher.end()
    assert code == 0


def test_rows_that_a_dead_copy_tried_count(audit: Path) -> None:
    """Three each: the successor of a worker that tried some rows tries the rest."""
    parcels("", "")
    arguments = (DELIVER, "--watch", "0.2", "--workers", "2", "--max-rows", "6")
    with watching(*arguments) as watcher:
        said = 0
        while said < 2:  # only then the parent knows
            said += int(watcher.says(f"{DELIVER}: ").split()[1])
        os.kill(min(handlers(audit)), signal.SIGKILL)
        watcher.says(f"{DELIVER}, worker ", err=True)
        parcels(*[""] * 6)
        code, _, err = watcher.end(None)
    assert (code, err) == (0, "")
    assert Parcel.objects.filter(sent=True).count() == 6


def test_a_copy_that_lived_long_is_started_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predecessors' deaths are forgotten."""
    waits: list[float] = []

    def tell(number: int, name: str | None, news: object) -> None:
        assert isinstance(news, Died)
        assert news.wait is not None
        waits.append(news.wait)

    def work(number: int) -> Any:
        pytest.fail("no worker is to be started")

    supervised = Supervisor(1, work, stop=Stop(), tell=tell, restart=BACKOFF)
    (place,) = supervised._places
    for lived in [0.0] * 5 + [LIVED_LONG]:
        place.started = time.monotonic() - lived
        supervised._died(place, Trouble("killed"))
    assert waits[0] <= 1
    assert 8 <= waits[4] <= 16
    assert waits[5] <= 1
