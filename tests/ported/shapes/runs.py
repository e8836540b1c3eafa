from __future__ import annotations

from dcl_processor import batch_processor
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def some(item: Item) -> None:
    outside.perform(item.name)


def most_rows() -> None:
    some(limit=2)


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def for_a_time(item: Item) -> None:
    outside.perform(item.name)


def time_box() -> None:
    for_a_time(timeout=60)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    max_consecutive_failures=2,
)
def stop_after_failures(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, max_workers=1
)
def one_worker(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, max_workers=2
)
def two_workers(item: Item) -> None:
    outside.perform(item.name)
