from __future__ import annotations

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.ported import outside
from tests.ported.models import Task


@batch_processor(
    pending=lambda: Task.objects.filter(state="queued").order_by("-priority", "pk"),
    done={"state": "done"},
    failed={"state": "failed"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(300),
    retry=Retry(3, backoff=60),
    strict_order=True,
)
def work(task: Task) -> None:
    outside.perform(task.payload)
