"""A row that kills its process: named by the next run, handled last, and no cost to the others."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.pending import scan
from dcl_processor.runner import in_flight
from tests.contract.support.reports import assert_run
from tests.edge.manage import at_gate, processors, started
from tests.edge.watchers import parcels
from tests.models import Parcel
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"
DIED = (
    r"warehouse\.deliver: process \d+ died while it handled row {} \(since \d{{4}}-\d\d-\d\d "
    r"\d\d:\d\d:\d\d\+00:00\); if still pending, these rows are handled last, one by one"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the notes in a folder of the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"dcl_processor-{os.getuid()}"


def unsent() -> list[int]:
    return list(Parcel.objects.filter(sent=False).order_by("pk").values_list("pk", flat=True))


def two_hundred(note: str) -> list[Parcel]:
    return Parcel.objects.bulk_create(Parcel(note=note if n == 2 else "") for n in range(200))


@pytest.mark.parametrize(("note", "code"), [("exit at once", 9), ("kill", -9), ("crash", -11)])
def test_a_row_that_kills_its_process_costs_the_others_nothing(
    folder: Path, tmp_path: Path, note: str, code: int
) -> None:
    deadly = two_hundred(note)[2].pk
    first = processors("run", DELIVER, AUDIT=str(tmp_path / "audit"))
    assert (first.returncode, len(unsent())) == (code, 198)
    second = processors("run", DELIVER, AUDIT=str(tmp_path / "audit"))
    assert (second.returncode, unsent()) == (code, [deadly])
    assert re.fullmatch(DIED.format(deadly), second.stderr.splitlines()[0])
    third = processors("run", DELIVER, AUDIT=str(tmp_path / "audit"))
    assert re.fullmatch(DIED.format(deadly), third.stderr.splitlines()[0])
    handled = (tmp_path / "audit").read_text().splitlines()
    assert len(handled) == 199 + 3
    # However often it dies, there is one note; and none once the row has been handled.
    assert len(list(folder.iterdir())) == 1
    Parcel.objects.filter(pk=deadly).update(note="")
    last = processors("run", DELIVER)
    assert (last.returncode, unsent()) == (0, [])
    assert re.fullmatch(DIED.format(deadly), last.stderr.strip())
    assert list(folder.iterdir()) == []
    assert processors("run", DELIVER).stderr == ""


def test_with_four_copies_one_run_does_all_the_others(folder: Path) -> None:
    """A worker that has looked for dead ones leaves the row that kills to the next run."""
    deadly = two_hundred("exit at once")[2].pk
    runs = 0
    said: list[str] = []
    while len(unsent()) > 1:
        done = processors("run", DELIVER, "--workers", "4")
        assert done.returncode == 1
        said += done.stderr.splitlines()
        runs += 1
    assert unsent() == [deadly]
    assert runs <= 2
    left = f"died while it handled row {deadly} .*; if still pending, these rows are left to the"
    assert any(re.search(left, line) for line in said), said
    assert processors("run", DELIVER, "--workers", "4").returncode == 9  # of its only worker
    assert unsent() == [deadly]


def test_a_row_at_hand_of_a_living_process_is_no_suspect(folder: Path, gate: Path) -> None:
    parcels("gate", "")
    with started("run", DELIVER, GATE=str(gate)) as process:
        at_gate(gate)
        [note] = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        other = processors("run", DELIVER, "--timeout", "1")
        assert (other.returncode, other.stderr) == (0, "")
        (gate / "open").touch()
        assert process.wait(PATIENCE) == 0
    assert list(folder.iterdir()) == []


# --- in this process


def deliver(handle: Any = lambda row: None, **options: Any) -> BatchProcessor[Parcel]:
    options = {"pending": Parcel.objects.filter(sent=False), "done": {"sent": True}, **options}
    return batch_processor(**options)(handle)


def notes_of(processor: BatchProcessor[Parcel]) -> in_flight.Notes:
    notes = in_flight.Notes(processor.name)
    notes.using = connection.alias
    return notes


def left_by_the_dead(*keys: object, number: int = 1, processor: BatchProcessor[Parcel]) -> Path:
    place = notes_of(processor).place()
    assert place is not None
    path = place.with_name(f"{place.name}-{4711 + number}-{number}")
    path.write_text(f"{chr(0).join(map(str, keys))}\0\0")
    os.utime(path, 2 * (1_700_000_000 + number,))
    return path


def test_suspects_come_last_and_the_one_of_the_last_death_at_the_very_last(folder: Path) -> None:
    rows = parcels(*[""] * 6)
    calls: list[int] = []
    processor = deliver(lambda row: calls.append(row.pk), batch_size=10)
    left_by_the_dead(rows[0], rows[1], processor=processor)
    left_by_the_dead(rows[0], number=2, processor=processor)
    assert_run(processor(), processed=6)
    assert calls == [*rows[2:], rows[1], rows[0]]
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(connection.vendor == "mysql", reason="keys are refused there")
def test_suspects_of_several_keys_come_after_the_other_keys(folder: Path) -> None:
    rows = parcels(*[""] * 8)
    for place, row in enumerate(rows):
        Parcel.objects.filter(pk=row).update(priority=place // 2)
    calls: list[int] = []
    processor = deliver(lambda row: calls.append(row.pk), group_by="priority", in_order=True)
    left_by_the_dead(rows[0], processor=processor)
    left_by_the_dead(rows[2], number=3, processor=processor)
    left_by_the_dead(rows[4], number=2, processor=processor)
    assert_run(processor(timeout=PATIENCE), processed=8)
    # A run begins with any of the keys, and goes round: no start gives this order.
    assert calls == [*rows[6:], *rows[:2], *rows[4:6], *rows[2:4]]


@pytest.mark.skipif(connection.vendor == "mysql", reason="keys are refused there")
def test_a_suspect_holds_no_other_row_of_its_key(folder: Path) -> None:
    rows = parcels(*[""] * 8)
    calls: list[int] = []
    processor = deliver(lambda row: calls.append(row.pk), group_by="priority", batch_size=3)
    left_by_the_dead(rows[0], rows[1], processor=processor)
    left_by_the_dead(rows[4], number=2, processor=processor)
    assert_run(processor(timeout=PATIENCE), processed=8)
    assert calls[:5] == [rows[place] for place in (2, 3, 5, 6, 7)]
    assert (sorted(calls[5:7]), calls[7]) == (rows[:2], rows[4])
    assert (unsent(), list(folder.iterdir())) == ([], [])


@pytest.mark.skipif(connection.vendor == "mysql", reason="keys are refused there")
@pytest.mark.parametrize("in_order", [False, True])
def test_a_suspect_that_died_beside_the_run_is_all_that_is_left_unless_in_order(
    folder: Path, in_order: bool
) -> None:
    """Of a worker that has nothing else to do: another one was killed while it was at work."""
    rows = parcels(*[""] * 250)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)

    processor = deliver(handle, group_by="priority", in_order=in_order)
    note = left_by_the_dead(rows[0], processor=processor)
    # As if its process had died after the run began.
    later = note.stat().st_mtime + 2_000_000_000
    os.utime(note, (later, later))
    report = processor(timeout=PATIENCE)
    assert unsent() == (rows if in_order else rows[:1])
    assert calls == ([] if in_order else rows[1:])
    assert_run(report, processed=len(calls), held=250 if in_order else 0)
    assert len(list(folder.iterdir())) == 1
    os.utime(next(folder.iterdir()), (0, 0))
    assert_run(processor(timeout=PATIENCE), processed=250 if in_order else 1)
    assert (sorted(calls), unsent()) == (rows, [])


def test_suspects_are_left_out_of_the_windows_that_follow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window begins at the head, and so do they."""
    monkeypatch.setattr(scan, "WINDOW", 2)
    rows = parcels(*[""] * 10)
    calls: list[int] = []
    ordered = Parcel.objects.filter(sent=False).order_by("pk")
    processor = deliver(lambda row: calls.append(row.pk), pending=ordered)
    left_by_the_dead(rows[0], processor=processor)
    assert_run(processor(), processed=10)
    assert calls == [*rows[1:], rows[0]]


def test_each_death_is_reported_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = parcels("", "")
    processor = deliver()
    left_by_the_dead(rows[0], processor=processor)
    for _ in range(2):
        processor(limit=0)
        processor(limit=1)
    said = [record for record in caplog.records if record.name == in_flight.logger.name]
    assert [record.levelname for record in said] == ["ERROR"]
    assert f"process 4712 died while it handled row {rows[0]}" in said[0].getMessage()
    assert unsent() == []


def test_all_rows_of_a_batch_handler_are_noted(folder: Path) -> None:
    rows = parcels(*[""] * 3)
    noted: list[in_flight.Death] = []

    def together(_: Sequence[Parcel]) -> None:
        [path] = folder.iterdir()
        noted.extend(copied(path))

    assert_run(deliver(process_batch=together, batch_size=3)(), processed=3)
    assert [each.keys for each in noted] == [tuple(str(pk) for pk in rows)]


def test_rows_of_a_call_that_killed_its_process_come_last_and_alone(folder: Path) -> None:
    """When their leases have lapsed; until then the note stays."""
    rows = parcels(*[""] * 5)
    calls: list[list[int]] = []

    def together(found: Sequence[Parcel]) -> None:
        calls.append([row.pk for row in found])

    processor = leased(lambda row: None, process_batch=together, batch_size=2)
    left_by_the_dead(rows[0], rows[1], processor=processor)
    dead = Parcel.objects.filter(pk__in=rows[:2])
    dead.update(leased_until=timezone.now() + timedelta(days=1))
    assert_run(processor(limit=1), processed=1, stopped="limit")
    assert_run(processor(), processed=2)
    assert len(list(folder.iterdir())) == 1
    dead.update(leased_until=timezone.now() - timedelta(days=1))
    assert_run(processor(), processed=2)
    assert calls == [[rows[2]], rows[3:], [rows[0]], [rows[1]]]
    assert list(folder.iterdir()) == []


def leased(handle: object, **options: object) -> BatchProcessor[Parcel]:
    return deliver(handle, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60), **options)


COLUMNS: dict[str, Any] = {"attempts": "tries", "next_attempt_at": None, "last_error": None}
BOUNDED = Retry(3, **COLUMNS)
#: With these, a row whose handler kills its process is tried again without end.
UNBOUNDED = [None, Retry(None, **COLUMNS)]


@pytest.mark.parametrize("retry", UNBOUNDED)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_leased_row_is_noted_where_nothing_bounds_its_attempts(
    folder: Path, kind: str, retry: Retry | None
) -> None:
    """Also the second row of a batch: until it is settled, and no row of those before it."""
    noted: list[tuple[str, ...]] = []

    def handle(row: Parcel) -> None:
        noted.extend(noted_in(folder))

    async def handle_soon(row: Parcel) -> None:
        handle(row)

    rows = parcels(*[""] * 3)
    processor = leased(handle if kind == "def" else handle_soon, batch_size=2, retry=retry)
    assert_run(processor(), processed=3)
    assert noted == [(str(pk),) for pk in rows]
    assert list(folder.iterdir()) == []


def test_all_leased_rows_of_the_handlers_on_an_event_loop_are_noted(folder: Path) -> None:
    """Those that have ended are in the note no more, because they were not in flight."""
    rows = parcels(*[""] * 3)
    keys = [str(pk) for pk in rows]
    at_work: list[int] = []

    async def handle(row: Parcel) -> None:
        at_work.append(row.pk)
        expected = tuple(keys[:2]) if row.pk == rows[0] else (keys[1], keys[2])
        if row.pk == rows[1]:
            return await becomes(lambda: len(at_work) == 4)
        await becomes(lambda: len(at_work) >= 2 and noted_in(folder) == [expected])
        if row.pk == rows[2]:
            at_work.append(0)
        return None

    assert_run(leased(handle)(concurrency=2), processed=3)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_leased_row_is_not_noted_where_retry_gives_up_on_it(folder: Path, kind: str) -> None:
    def handle(row: Parcel) -> None:
        assert not folder.exists()

    async def handle_soon(row: Parcel) -> None:
        handle(row)

    parcels("", "")
    processor = leased(handle if kind == "def" else handle_soon, retry=BOUNDED)
    assert_run(processor(), processed=2)
    assert not folder.exists()


def test_rows_that_are_handed_out_are_not_noted(folder: Path) -> None:
    """They are handled elsewhere; and the note of a run stays, which a hand-out did not see."""
    rows = parcels("", "")
    processor = leased(lambda row: None)
    note = left_by_the_dead(rows[0], processor=processor)
    for reservation in processor.reserve(limit=5):
        reservation.settle()
    assert unsent() == []
    assert list(folder.iterdir()) == [note]


def test_a_note_stays_if_its_lease_lapses_after_the_run_has_looked_for_rows(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has not come to that row, although no lease keeps others from it at the end."""
    rows = parcels("", "")
    dead = Parcel.objects.filter(pk=rows[0])
    dead.update(leased_until=timezone.now() + timedelta(days=1))
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        if row.pk == rows[1]:
            dead.update(leased_until=timezone.now() - timedelta(days=1))

    processor = leased(handle)
    left_by_the_dead(rows[0], processor=processor)
    assert_run(processor(), processed=1)
    assert len(list(folder.iterdir())) == 1
    another = parcels("")
    assert_run(processor(), processed=2)
    assert calls == [rows[1], *another, rows[0]]
    assert list(folder.iterdir()) == []
    [said] = [record for record in caplog.records if record.name == in_flight.logger.name]
    assert f"died while it handled row {rows[0]} (since" in said.getMessage()


def test_in_a_batch_of_single_rows_the_one_at_hand_is_noted(folder: Path) -> None:
    rows = parcels(*[""] * 3_000)
    noted: list[str] = []

    def handle(row: Parcel) -> None:
        [path] = folder.iterdir()
        [death] = copied(path)
        noted.extend(death.keys)

    assert_run(deliver(handle, batch_size=3_000)(), processed=3_000)
    assert noted == [str(pk) for pk in rows]


def noted_in(folder: Path) -> list[tuple[str, ...]]:
    return [each.keys for path in folder.iterdir() for each in copied(path)]


async def becomes(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


def copied(path: Path) -> list[in_flight.Death]:
    """Read a note as if its process had died: a worker is locked by none."""
    worker = path.parent.parent / path.name
    worker.write_bytes(path.read_bytes())
    death = in_flight.read_note(worker)
    return [] if death is None else [death]


@pytest.mark.parametrize("state", ["file", "link", "open to others", "none"])
def test_where_the_folder_is_not_ours_alone_a_run_does_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    match state:
        case "file":
            folder.touch()
        case "link":
            folder.symlink_to(elsewhere)
        case "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        case "none":
            monkeypatch.setattr("tempfile.tempdir", "/proc/self/fdinfo")  # as a read-only one
    parcels("", "")
    assert_run(deliver()(), processed=2)
    assert list(elsewhere.iterdir()) == []


def refuse(*_: object) -> int:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("module", "function", "instead"), [(os, "pwrite", refuse), (in_flight.fcntl, "flock", refuse)]
)
def test_where_a_note_cannot_be_made_a_run_does_without(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    function: str,
    instead: Callable[..., int],
) -> None:
    """Nor does it keep a file: neither open nor in the folder."""
    seen: list[Path] = []
    processor = deliver(lambda row: seen.extend(folder.iterdir()))
    parcels("")
    assert_run(processor(), processed=1)
    assert len(seen) == 1
    monkeypatch.setattr(module, function, instead)
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        parcels("", "")
        assert_run(processor(), processed=2)
    assert len(seen) == 1
    assert len(list(Path("/dev/fd").iterdir())) <= before


UNREADABLE = ["", "\0\0", "short", "1\0", "\u20ac"]


def test_what_is_no_note_is_passed(folder: Path) -> None:
    parcels("")
    processor = deliver()
    for number, text in enumerate(UNREADABLE, 1):
        left_by_the_dead("1", number=number, processor=processor).write_text(text)
    assert_run(processor(), processed=1)
