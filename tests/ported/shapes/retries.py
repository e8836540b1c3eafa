from __future__ import annotations

from django.db.models import F

from dcl_processor import Retry, Snooze, batch_processor
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
)
def one_try(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(3, next_attempt_at=None, last_error=None),
)
def counted(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(3, backoff=60),
)
def backoff(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(None, backoff=3600, jitter=0, attempts=None, give_up_on=LookupError),
)
def every_hour(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry("allowed", backoff=60),
)
def own_limit(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state__in=["new", "deferred"]),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(3, on_failure={"state": "deferred"}),
)
def deferred(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(3, give_up_on=LookupError),
)
def permanent(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, retry=Retry()
)
def not_yet(item: Item) -> None:
    if item.amount == 0:
        raise Snooze("not yet", delay=600)
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new").order_by("-priority"),
    done={"state": "done"},
    retry=Retry(3, next_attempt_at=None, on_failure={"priority": F("priority") - 1}),
    strict_order=True,
)
def to_the_end(item: Item) -> None:
    outside.perform(item.name)
