from __future__ import annotations

import logging
from time import monotonic

from django.db import connection, transaction

from tests.ported import outside
from tests.ported.models import Item

logger = logging.getLogger(__name__)


def most_rows() -> None:
    for pk in Item.objects.filter(state="new").order_by("pk").values_list("pk", flat=True)[:2]:
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def time_box() -> None:
    end = monotonic() + 60
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        if monotonic() >= end:
            return
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def stop_after_failures() -> None:
    failures = 0
    for pk in Item.objects.filter(state="new").order_by("pk").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
            failures = 0
        except ValueError:
            logger.exception("item %s failed", pk)
            failures += 1
            if failures == 2:
                return


def one_worker() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(7102)")
        if not cursor.fetchone()[0]:
            return
    try:
        for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
            try:
                with transaction.atomic():
                    item = Item.objects.select_for_update().get(pk=pk)
                    if item.state == "new":
                        outside.perform(item.name)
                        Item.objects.filter(pk=pk).update(state="done")
            except ValueError:
                logger.exception("item %s failed", pk)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(7102)")


def two_workers() -> None:
    for slot in (7103, 7104):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_lock(%s)", [slot])
            if cursor.fetchone()[0]:
                break
    else:
        return
    try:
        for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
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
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [slot])
