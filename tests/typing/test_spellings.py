"""What a type checker knows of a row, in both spellings.

mypy and pyright read this file: an ``assert_type`` that does not hold and a ``type: ignore`` that
is not needed are errors to both.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Report, batch_processor
from tests.models import Letter, Parcel


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False),
    done={"sent": True},
    delivery=Delivery.TRANSACTIONAL,
    strict_order=True,
)
def send_parcel(row: Parcel) -> int:
    return row.priority


@batch_processor(pending=Parcel.objects.filter(sent=False), done=lambda row, result: {"sent": True})
def send_from_a_queryset(row: Parcel) -> None: ...


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


class Base(BatchProcessor[Any]):
    colour = "red"


@batch_processor(pending=Parcel.objects.all(), base=Base, colour="blue")
def send_with_a_base(row: Parcel) -> None: ...


def test_both_spellings_know_their_row() -> None:
    assert_type(send_parcel, BatchProcessor[Parcel])
    assert_type(send_from_a_queryset, BatchProcessor[Parcel])
    assert_type(send_with_a_base, BatchProcessor[Parcel])
    assert_type(send_letters.pending(), QuerySet[Letter])
    assert_type(send_letters.process(Letter()), str)


def runs() -> None:
    """Never called: what a run takes and returns."""
    assert_type(send_parcel(), Report)
    assert_type(send_letters.run(limit=3, timeout=1.5), Report)
    assert_type(send_parcel().raise_for_failures(), Report)


def mistakes() -> None:
    """Never called: what a type checker finds before anything runs."""
    send_parcel(Parcel())  # type: ignore[arg-type]
    send_parcel(limt=3)  # type: ignore[call-arg]
    send_parcel(limit="3")  # type: ignore[arg-type]
    send_parcel.process(Letter())  # type: ignore[arg-type]
    batch_processor(pending=Parcel.objects.all(), bach_size=3)  # type: ignore[call-overload]

    @batch_processor(pending=Parcel.objects.all())  # type: ignore[arg-type]
    def wrong_row(row: Letter) -> None: ...
