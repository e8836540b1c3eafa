from __future__ import annotations

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.ported import outside
from tests.ported.models import ChatUpdate


@batch_processor(
    pending=lambda: ChatUpdate.objects.filter(state="new").order_by("number"),
    done={"state": "done"},
    failed={"state": "failed"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(300),
    retry=Retry(3, backoff=60),
    group_by="chat",
    in_order=True,
)
def answer(update: ChatUpdate) -> None:
    outside.perform(update.text)
