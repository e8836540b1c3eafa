from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from django.db import connections, transaction
from django.db.models import Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item, Part

logger = logging.getLogger(__name__)


def bulk_call() -> None:
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            items = list(new[:100])
            if not items:
                return
            try:
                outside.push("all", [item.name for item in items])
                done = items
            except ValueError:
                done = []
                for item in items:
                    try:
                        outside.push("all", [item.name])
                        done.append(item)
                    except ValueError:
                        logger.exception("item %s failed", item.pk)
            Item.objects.filter(pk__in=[item.pk for item in done]).update(state="done")
            if len(done) < len(items):
                return


def bulk_results() -> None:
    while True:
        now = timezone.now()
        free = Q(leased_until=None) | Q(leased_until__lte=now)
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
            items = list(new[:100])
            leased = Item.objects.filter(pk__in=[item.pk for item in items])
            leased.update(leased_until=now + timedelta(minutes=1))
        if not items:
            return
        answers = outside.mutate([(item.name, item.amount) for item in items])
        for item, answer in zip(items, answers, strict=True):
            item.state, item.leased_until = "refused" if answer else "done", None
        Item.objects.bulk_update(items, ["state", "leased_until"])


def bulk_values() -> None:
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            items = list(new[:100])
            if not items:
                return
            for item in items:
                item.state, item.result = "done", outside.ask(item.name)
            Item.objects.bulk_update(items, ["state", "result"])


def bulk_children() -> None:
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            items = list(new[:100])
            if not items:
                return
            Part.objects.bulk_create([Part(item=item, text="from work") for item in items])
            for item in items:
                item.state = "done"
            Item.objects.bulk_update(items, ["state"])


def one_connection() -> None:
    with outside.connect() as connection:
        for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
            try:
                with transaction.atomic():
                    free = Item.objects.select_for_update(skip_locked=True)
                    item = free.filter(pk=pk, state="new").first()
                    if item is not None:
                        outside.perform(f"{item.name} {connection}")
                        free.filter(pk=pk).update(state="done")
            except ValueError:
                logger.exception("item %s failed", pk)


def work_in_thread(pk: int) -> None:
    try:
        with transaction.atomic():
            free = Item.objects.select_for_update(skip_locked=True)
            item = free.filter(pk=pk, state="new").first()
            if item is not None:
                outside.perform(item.name)
                free.filter(pk=pk).update(state="done")
    except ValueError:
        logger.exception("item %s failed", pk)
    finally:
        connections.close_all()


def threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(work_in_thread, Item.objects.filter(state="new").values_list("pk", flat=True))
        )


async def perform(item: Item) -> None:
    await asyncio.sleep(0)
    outside.perform(item.name)


async def perform_all(items: Sequence[Item]) -> list[BaseException | None]:
    return await asyncio.gather(*map(perform, items), return_exceptions=True)


def coroutines() -> None:
    now = timezone.now()
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
        items = list(new[:4])
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(leased_until=now + timedelta(minutes=1))
    for item, error in zip(items, asyncio.run(perform_all(items)), strict=True):
        item.state, item.leased_until = "new" if error else "done", None
    Item.objects.bulk_update(items, ["state", "leased_until"])
