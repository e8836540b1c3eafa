"""What a type checker knows of a row, in both spellings.

mypy and pyright read this file: an ``assert_type`` that does not hold and a ``type: ignore`` that
is not needed are errors to both.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, assert_type

from django.db.models import QuerySet

from dcl_processor import (
    BatchProcessor,
    Delivery,
    Discard,
    Lease,
    Report,
    Retry,
    Snooze,
    batch_processor,
)
from tests.models import Letter, Parcel


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False),
    done={"sent": True},
    delivery=Delivery.TRANSACTIONAL,
)
def send_parcel(row: Parcel) -> int:
    return row.priority


@batch_processor(pending=Parcel.objects.filter(sent=False), done=lambda row, result: {"sent": True})
def send_from_a_queryset(row: Parcel) -> None: ...


@batch_processor(pending=Parcel.objects.filter(sent=False), done=lambda row: {"sent": True})
def send_whatever_comes_of_it(row: Parcel) -> None: ...


class SendLetters(BatchProcessor[Letter]):
    done = {"sent": True}

    def pending(self) -> QuerySet[Letter]:
        return Letter.objects.filter(sent=False)

    def process(self, row: Letter, /) -> str:
        assert_type(row, Letter)
        return str(row.id)

    def get_done(self, row: Letter, result: Any, /) -> Mapping[str, Any]:
        assert_type(row, Letter)
        return {"sent": True}


send_letters = SendLetters()


class Line:
    """Something that a handler needs open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False),
    done={"sent": True},
    failed=lambda row, error: {"note": f"{row.pk}: {error}"},
    resource=Line,
    retry=Retry(max_attempts=3, backoff=timedelta(minutes=1), give_up_on=(ValueError, KeyError)),
)
def send_on_a_line(row: Parcel, line: Line) -> None: ...


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False),
    done={"sent": True},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(timedelta(seconds=30), field="sent_at"),
)
async def send_later(row: Parcel) -> None:
    if row.priority < 0:
        raise Snooze("not yet", delay=timedelta(minutes=5))
    if row.weight is None:
        raise Discard("weighs nothing")


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False, note=""),
    done=lambda row, result: {"sent": True, "note": result},
    delivery="at_most_once",
    claim={"note": "sending"},
    claimed_at="sent_at",
    reset={"note": ""},
    max_consecutive_failures=10,
    max_pending=1_000,
    concurrency=4,
    pending_since="sent_at",
)
def send_at_most_once(row: Parcel) -> str:
    return str(row.pk)


class SendTogether(BatchProcessor[Parcel]):
    done = {"sent": True}
    batch_size = 100

    def pending(self) -> QuerySet[Parcel]:
        return Parcel.objects.filter(sent=False)

    def process_batch(self, rows: Sequence[Parcel], /) -> Sequence[str]:
        assert_type(rows, Sequence[Parcel])
        return [str(row.pk) for row in rows]

    def get_failed(self, row: Parcel, error: Exception, /) -> Mapping[str, Any]:
        assert_type(error, Exception)
        return {"note": str(error)}


class SendOnALine(BatchProcessor[Parcel]):
    done = {"sent": True}

    def pending(self) -> QuerySet[Parcel]:
        return Parcel.objects.filter(sent=False)

    def process(self, row: Parcel, line: Line, /) -> None: ...

    def resource(self) -> Line:
        return Line()


send_together = SendTogether()


def test_both_spellings_know_their_row() -> None:
    assert_type(send_parcel, BatchProcessor[Parcel])
    assert_type(send_from_a_queryset, BatchProcessor[Parcel])
    assert_type(send_whatever_comes_of_it, BatchProcessor[Parcel])
    assert_type(send_letters.pending(), QuerySet[Letter])
    assert_type(send_letters.process(Letter()), str)
    assert_type(send_on_a_line, BatchProcessor[Parcel])
    assert_type(send_later, BatchProcessor[Parcel])
    assert_type(send_at_most_once, BatchProcessor[Parcel])
    assert_type(send_together.process_batch([]), Sequence[str])
    assert_type(SendOnALine().process(Parcel(), Line()), None)


def runs() -> None:
    """Never called: what a run takes and returns."""
    assert_type(send_parcel(), Report)
    assert_type(send_letters.run(limit=3, timeout=1.5), Report)
    assert_type(send_letters.run(concurrency=None), Report)
    assert_type(send_parcel().raise_for_failures(), Report)
    assert_type(send_at_most_once.in_doubt(older_than=timedelta(hours=1)), QuerySet[Parcel, Parcel])
    assert_type(send_at_most_once.in_progress(), QuerySet[Parcel, Parcel])
    assert_type(send_at_most_once.requeue(Parcel.objects.filter(pk=3)), int)
    assert_type(send_at_most_once.mark_done(send_at_most_once.in_doubt(older_than=60)), int)


def mistakes() -> None:
    """Never called: what a type checker finds before anything runs."""
    send_parcel(Parcel())  # type: ignore[arg-type]
    send_parcel(limt=3)  # type: ignore[call-arg]
    send_parcel(limit="3")  # type: ignore[arg-type]
    send_parcel.process(Letter())  # type: ignore[arg-type]
    batch_processor(pending=Parcel.objects.all(), bach_size=3)  # type: ignore[call-arg]
    batch_processor(pending=Parcel.objects.all(), lease=30)  # type: ignore[arg-type]
    send_at_most_once.requeue(Letter.objects.all())  # type: ignore[arg-type]
    send_at_most_once.in_doubt()  # type: ignore[call-arg]

    @batch_processor(pending=Parcel.objects.all())  # type: ignore[arg-type]
    def wrong_row(row: Letter) -> None: ...
