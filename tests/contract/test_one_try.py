"""Workers of one command: a row that failed in one of them is not tried by the others."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Snooze
from dcl_processor.delivery import claim_and_commit, deliveries
from dcl_processor.execution import failed_elsewhere
from dcl_processor.execution.failed_elsewhere import KEYS, FailedElsewhere
from dcl_processor.locking.key_lock import claim_in_turn
from tests.contract.support import errands as the
from tests.contract.support.other_worker import OtherWorker, beside, other_process
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.shared"
MAKES = [the.transactional, the.at_most_once, the.at_least_once]
each_delivery = pytest.mark.parametrize("make", MAKES)


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with other_process() as process:
        yield process


@pytest.fixture
def other(process: subprocess.Popen[str]) -> Iterator[OtherWorker]:
    with beside(process, NAME) as other:
        yield other


@each_delivery
def test_a_row_that_failed_in_another_worker_is_not_claimed(
    make: the.Make, other: OtherWorker
) -> None:
    rows = the.errands(5)
    calls: list[int] = []
    other.failed(rows[2].pk)
    report = make(lambda row: calls.append(row.place), name=NAME)()
    assert_run(report, processed=4)
    assert calls == [0, 1, 3, 4]
    assert the.untouched(rows[2])


@pytest.mark.parametrize("size", [1, 2])
@each_delivery
def test_a_row_that_failed_after_the_candidates_were_read_is_given_back_at_its_claim(
    make: the.Make, size: int, other: OtherWorker
) -> None:
    """Its lock was free, so the claim gets it; only the look after the claim finds it."""
    rows = the.errands(5)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 0:
            other.failed(rows[3].pk)

    report = make(handle, name=NAME, batch_size=size)()
    assert_run(report, processed=4)
    assert calls == [0, 1, 2, 4]
    assert the.untouched(rows[3])


@each_delivery
def test_a_claim_of_such_rows_alone_calls_no_handler(make: the.Make, other: OtherWorker) -> None:
    rows = the.errands(3)

    def handle(row: Errand) -> None:
        for each in rows[1:]:
            other.failed(each.pk)

    assert_run(make(handle, name=NAME)(), processed=1)
    assert the.untouched(rows[1])
    assert the.untouched(rows[2])


def test_asynchronous_handlers_leave_such_rows_alone(other: OtherWorker) -> None:
    rows = the.errands(5)
    other.failed(rows[1].pk)

    async def handle(row: Errand) -> None:
        """Succeed."""

    assert_run(the.at_least_once(handle, name=NAME)(concurrency=2), processed=4)
    assert the.untouched(rows[1])


def fail(row: Errand) -> None:
    raise ValueError(row.place)


def snooze(row: Errand) -> None:
    raise Snooze


@pytest.mark.parametrize("handle", [fail, snooze])
@each_delivery
def test_a_row_is_added_before_other_workers_can_claim_it(
    make: the.Make, handle: Callable[[Errand], None], other: OtherWorker
) -> None:
    """At the statement that is its last one, it is locked or marked, and added already."""
    the.errands(1)
    added: list[int] = []

    def observe(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        with other.file() as file:
            if sql.lstrip().startswith("UPDATE") and "next_attempt_at" in sql:
                added.append(file.added)
        return execute(sql, *args)

    run = make(handle, name=NAME, retry=the.retry(), reset={"claimed": False})
    with connection.execute_wrapper(observe):
        run()
    assert added[-1] == 1


def test_a_row_that_succeeds_is_not_added(other: OtherWorker) -> None:
    the.errands(5)
    assert_run(the.transactional(the.ignore, name=NAME)(), processed=5)
    with other.file() as file:
        assert file.added == 0


def test_a_worker_redoes_the_rows_of_its_own_batch(other: OtherWorker) -> None:
    """One of them ended the transaction after another one had failed."""
    the.errands(3)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 0 and len(calls) == 1:
            raise ValueError
        if row.place == 2 and len(calls) == 3:
            connection.connection.rollback()

    the.transactional(handle, name=NAME, batch_size=3)()
    assert calls[:5] == [0, 1, 2, 0, 1]
    assert [row.place for row in Errand.objects.filter(done=True).order_by("place")][:2] == [0, 1]
    with other.file() as file:
        assert file.added >= 1


def digest(make: the.Make, calls: list[list[int]], act: Any = len, **options: Any) -> Any:
    """Make a processor that is called once for each place."""

    def process_batch(rows: Sequence[Errand]) -> None:
        calls.append([row.pk for row in rows])
        act(rows)

    if make is the.at_most_once:
        options["done"] = {"done": True, "claimed": False}
    options = {"process_batch": process_batch, "group_by": "place", "batch_size": 2, **options}
    return make(the.ignore, name=NAME, **options)


@each_delivery
def test_a_key_that_another_worker_was_called_for_waits_for_the_next_run(
    make: the.Make, other: OtherWorker
) -> None:
    """A cap left the rest of it; the first key is known before the run, the second by the claim."""
    rows = [Errand.objects.create(place=place) for place in (1, 2, 3) for _ in range(2)]
    calls: list[list[int]] = []
    other.called(1)

    def call_the_others(rows: Sequence[Errand]) -> None:
        other.called(5 - rows[0].place)

    report = digest(make, calls, call_the_others)()
    assert len(calls) == 1
    assert_run(report, processed=2)
    left = Errand.objects.filter(done=False, claimed=False, leased_until=None)
    assert sorted(left.values_list("pk", flat=True)) == sorted(
        {row.pk for row in rows}.difference(calls[0])
    )


@each_delivery
def test_a_key_that_is_called_between_the_read_and_the_claim_is_given_back(
    make: the.Make, other: OtherWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the key was free, so the claim gets its rows; the look after it finds the key."""
    rows = [Errand.objects.create(place=1) for _ in range(5)]
    calls: list[list[int]] = []

    def claim_late(*arguments: Any) -> Any:
        claimed = claim_in_turn(*arguments)
        other.called(1)
        return claimed

    for module in (deliveries, claim_and_commit):
        monkeypatch.setattr(module, "claim_in_turn", claim_late)
    assert_run(digest(make, calls)(), processed=0)
    assert calls == []
    assert all(the.untouched(row) for row in rows)


@each_delivery
def test_a_key_is_added_before_its_handler_is_called(make: the.Make, other: OtherWorker) -> None:
    for _ in range(3):
        Errand.objects.create(place=1)
    added: list[int] = []

    def look(rows: Sequence[Errand]) -> None:
        with other.file(KEYS) as file:
            added.append(file.added)

    run = digest(make, [], look)
    assert_run(run(), processed=2)
    assert added == [1]
    # What this worker has added itself does not keep its own next run from the key.
    assert_run(run(), processed=1)


def test_rows_of_a_call_that_raised_are_redone_although_the_key_had_its_call(
    other: OtherWorker,
) -> None:
    rows = [Errand.objects.create(place=1) for _ in range(2)]
    calls: list[list[int]] = []

    def fail(given: Sequence[Errand]) -> None:
        if given[0].pk == rows[0].pk:
            raise ValueError

    assert_run(digest(the.transactional, calls, fail)(), processed=1, failed=1)
    assert len(calls) == 3


def test_another_processor_shares_nothing(other: OtherWorker) -> None:
    rows = the.errands(2)
    other.failed(rows[0].pk)
    assert_run(the.transactional(the.ignore, name="shop.alone")(), processed=2)
    alone = the.errands(1)[-1]
    other.failed(alone.pk)
    other_label = OtherWorker(other.process, other.path, "shop.alone")
    other_label.failed(alone.pk)
    assert failed_elsewhere.of_run("shop.alone", "default") is None


def test_a_new_run_of_a_watch_tries_the_row_again(process: subprocess.Popen[str]) -> None:
    with beside(process, NAME, is_one_run=False) as other:
        rows = the.errands(3)
        other.failed(rows[1].pk)

        def handle(row: Errand) -> None:
            if row.place == 0:
                other.failed(rows[2].pk)

        run = the.transactional(handle, name=NAME)
        assert_run(run(), processed=2)
        assert the.untouched(rows[2])
        assert_run(run(), processed=1)


def test_i8_the_oldest_rows_are_forgotten(
    other: OtherWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_elsewhere, "MOST", 5)  # of this process's part
    with other.file() as file:
        mine = FailedElsewhere(file, NAME, "default", is_one_run=True)
        for pk in range(3):
            other.failed(pk)
        assert mine.among(range(10)) == [0, 1, 2]
        for pk in range(3, 5):
            other.failed(pk)
        assert mine.among(range(10)) == [0, 1, 2, 3, 4]
        assert len(mine._known) == 5
        late = FailedElsewhere(file, NAME, "default", is_one_run=True)
        assert late.among([7]) == []
        assert len(late._known) == 5
        mine.add(9)
        assert mine.among([9]) == []


def test_threads_of_a_worker_do_not_overtake_the_look_of_one_of_them(other: OtherWorker) -> None:
    with other.file() as file:
        mine = FailedElsewhere(file, NAME, "default", is_one_run=True)
        other.failed(7)
        found: list[Any] = []
        second = Thread(target=lambda: found.extend(mine.among([7])))

        class Known(dict[bytes, None]):
            def update(self, *args: Any) -> None:
                if second.ident is None:
                    second.start()
                    # The second thread waits for this one, or has ended too early.
                    second.join(timeout=0.5)
                super().update(*args)

        mine._known = Known()
        assert mine.among([7]) == [7]
        second.join()
        assert found == [7]


def test_the_file_has_room_on_the_disk_for_all_of_its_rows() -> None:
    """In a sparse file, a write on a full disk would end the worker by SIGBUS."""
    with failed_elsewhere.shared() as path:
        assert path is not None
        found = path.stat()
    assert found.st_size == failed_elsewhere.SIZE
    assert found.st_blocks * 512 >= failed_elsewhere.SIZE


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def refuse(file: int, content: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_a_part(file: int, content: bytes) -> int:
    return os.pwrite(file, content[:4_096], 0)


@pytest.mark.parametrize("write", [refuse, write_a_part])
def test_without_room_on_the_disk_the_workers_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], int]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()
    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with failed_elsewhere.shared() as path:
            assert path is None
            assert list(tmp_path.iterdir()) == []
    assert open_files() <= before


if connection.vendor == "mysql":  # keys are refused there
    del (
        test_a_key_that_another_worker_was_called_for_waits_for_the_next_run,
        test_a_key_that_is_called_between_the_read_and_the_claim_is_given_back,
        test_a_key_is_added_before_its_handler_is_called,
        test_rows_of_a_call_that_raised_are_redone_although_the_key_had_its_call,
    )
