from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item

logger = logging.getLogger(__name__)


def one_try() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        with transaction.atomic():
            item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
            if item is None or item.state != "new":
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError:
                item.state = "failed"
            item.save(update_fields=["state"])


def counted() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        with transaction.atomic():
            item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
            if item is None or item.state != "new":
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError:
                item.attempts += 1
                item.state = "new" if item.attempts < 3 else "failed"
            item.save(update_fields=["state", "attempts"])


def backoff() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    for pk in Item.objects.filter(due, state="new").values_list("pk", flat=True):
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            item = new.filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError as error:
                item.attempts, item.last_error = item.attempts + 1, str(error)
                item.state = "new" if item.attempts < 3 else "failed"
                delay = timedelta(seconds=60 * 2**item.attempts)
                item.next_attempt_at = timezone.now() + delay
            item.save(update_fields=["state", "attempts", "last_error", "next_attempt_at"])


def every_hour() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    for pk in Item.objects.filter(due, state="new").values_list("pk", flat=True):
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            item = new.filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except LookupError as error:
                item.state, item.last_error = "failed", str(error)
            except ValueError as error:
                item.last_error = str(error)
                item.next_attempt_at = timezone.now() + timedelta(hours=1)
            item.save(update_fields=["state", "last_error", "next_attempt_at"])


def own_limit() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    for pk in Item.objects.filter(due, state="new").values_list("pk", flat=True):
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            item = new.filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError as error:
                item.attempts, item.last_error = item.attempts + 1, str(error)
                if item.allowed is not None and item.attempts >= item.allowed:
                    item.state = "failed"
                delay = timedelta(seconds=60 * 2**item.attempts)
                item.next_attempt_at = timezone.now() + delay
            item.save(update_fields=["state", "attempts", "last_error", "next_attempt_at"])


def deferred() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    waiting = Item.objects.filter(due, state__in=["new", "deferred"])
    for pk in waiting.values_list("pk", flat=True):
        with transaction.atomic():
            item = waiting.select_for_update(skip_locked=True).filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError as error:
                item.attempts, item.last_error = item.attempts + 1, str(error)
                item.state = "deferred" if item.attempts < 3 else "failed"
                delay = timedelta(seconds=60 * 2**item.attempts)
                item.next_attempt_at = timezone.now() + delay
            item.save(update_fields=["state", "attempts", "last_error", "next_attempt_at"])


def permanent() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    for pk in Item.objects.filter(due, state="new").values_list("pk", flat=True):
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            item = new.filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except (LookupError, ValueError) as error:
                item.attempts, item.last_error = item.attempts + 1, str(error)
                if isinstance(error, LookupError) or item.attempts >= 3:
                    item.state = "failed"
                delay = timedelta(seconds=60 * 2**item.attempts)
                item.next_attempt_at = timezone.now() + delay
            item.save(update_fields=["state", "attempts", "last_error", "next_attempt_at"])


def not_yet() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    for pk in Item.objects.filter(due, state="new").values_list("pk", flat=True):
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            item = new.filter(pk=pk).first()
            if item is None:
                continue
            if item.amount == 0:
                item.next_attempt_at = timezone.now() + timedelta(seconds=600)
            else:
                outside.perform(item.name)
                item.state = "done"
            item.save(update_fields=["state", "next_attempt_at"])


def to_the_end() -> None:
    new = Item.objects.filter(state="new", attempts__lt=3).order_by("-priority")
    for pk in new.values_list("pk", flat=True):
        with transaction.atomic():
            item = new.select_for_update(skip_locked=True).filter(pk=pk).first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="done")
            except ValueError as error:
                Item.objects.filter(pk=pk).update(
                    priority=F("priority") - 1, attempts=F("attempts") + 1, last_error=str(error)
                )
