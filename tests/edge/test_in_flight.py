"""A row that kills its process: named by the next run, handled last, and no cost to the others."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.engine.poison import WIDTH, Notes
from tests.contract.support.reports import assert_run
from tests.edge.manage import processors, started
from tests.edge.watchers import parcels, unsent
from tests.gates import at_gate
from tests.models import Parcel
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"


@pytest.fixture
def folder(_notes: None) -> Path:
    """Return the folder of the notes."""
    return Path(tempfile.gettempdir()) / f"dcl_processor-{os.getuid()}"


def test_a_row_at_hand_of_a_living_process_is_no_suspect(folder: Path, gate: Path) -> None:
    parcels("gate", "")
    with started("run", DELIVER, GATE=str(gate)) as process:
        at_gate(gate)
        assert len(list(folder.iterdir())) == 1
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        other = processors("run", DELIVER, "--timeout", "1")
        assert (other.returncode, other.stderr) == (0, "")
        (gate / "open").touch()
        assert process.wait(PATIENCE) == 0
    assert list(folder.iterdir()) == []


# --- in this process


def deliver(handle: Any = lambda row: None, **options: Any) -> BatchProcessor[Parcel]:
    options = {"pending": Parcel.objects.filter(sent=False), "done": {"sent": True}, **options}
    return batch_processor(**options)(handle)


def left_by_the_dead(processor: BatchProcessor[Parcel], *keys: object) -> None:
    """Leave the note of a process that has died: of which nothing but the lock is gone."""
    notes = Notes(processor.name)
    notes.begin()
    notes.note(keys)
    notes._file.close()


def test_suspects_come_last_and_alone(folder: Path) -> None:
    rows = parcels(*[""] * 6)
    calls: list[list[int]] = []

    def together(found: Sequence[Parcel]) -> None:
        calls.append([row.pk for row in found])

    processor = deliver(process_batch=together, batch_size=10)
    left_by_the_dead(processor, rows[0], rows[1])
    assert_run(processor(), processed=6)
    assert calls[0] == rows[2:]
    assert sorted(calls[1:]) == [[rows[0]], [rows[1]]]
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(connection.vendor == "mysql", reason="keys are refused there")
@pytest.mark.parametrize("in_order", [False, True])
def test_a_suspect_holds_no_other_row_of_its_key_unless_in_order(
    folder: Path, in_order: bool
) -> None:
    rows = parcels(*[""] * 8)
    for place, row in enumerate(rows):
        Parcel.objects.filter(pk=row).update(priority=place // 4)
    calls: list[int] = []
    size = 1 if in_order else 3
    grouped: dict[str, Any] = {"group_by": "priority", "in_order": in_order, "batch_size": size}
    processor = deliver(lambda row: calls.append(row.pk), **grouped)
    left_by_the_dead(processor, rows[0])
    assert_run(processor(timeout=PATIENCE), processed=8, passes=1)
    if in_order:
        assert [row for row in calls if row in rows[:4]] == rows[:4]
        assert calls.index(rows[0]) >= 4
    else:
        assert calls[-1] == rows[0]
    assert (unsent(), list(folder.iterdir())) == (set(), [])


def test_all_rows_of_a_batch_handler_are_noted(folder: Path) -> None:
    rows = parcels(*[""] * 3)
    noted: list[str] = []

    def together(_: Sequence[Parcel]) -> None:
        [path] = folder.iterdir()
        noted.extend(filter(None, path.read_text().split("\0")))

    assert_run(deliver(process_batch=together, batch_size=3)(), processed=3)
    assert noted == [str(pk) for pk in rows]


def test_in_a_batch_of_single_rows_the_one_at_hand_is_noted(folder: Path) -> None:
    rows = parcels(*[""] * 300)
    noted: list[str] = []

    def handle(row: Parcel) -> None:
        [path] = folder.iterdir()
        noted.extend(filter(None, path.read_text().split("\0")))

    assert_run(deliver(handle, batch_size=300)(), processed=300)
    assert noted == [str(pk) for pk in rows]


def test_where_there_can_be_no_folder_a_run_does_without(folder: Path) -> None:
    folder.touch()
    parcels("", "")
    assert_run(deliver()(), processed=2)


def test_what_is_no_note_is_passed(folder: Path) -> None:
    parcels("")
    processor = deliver()
    for text in ("", "\0\0", "short", "\u20ac"):
        left_by_the_dead(processor)
        next(each for each in folder.iterdir() if each.stat().st_size == WIDTH).write_text(text)
    assert_run(processor(), processed=1)
