from __future__ import annotations

from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry
from tests.ported import outside
from tests.ported.models import Job


class Work(BatchProcessor[Job]):
    claim = {"state": "running", "worker": outside.worker}
    done = {"state": "done"}
    failed = {"state": "failed"}
    reset = {"state": "new"}
    delivery = Delivery.AT_LEAST_ONCE
    lease = Lease(300)
    retry = Retry(3, backoff=60)
    group_by = "kind"
    max_per_group = 2

    def pending(self) -> QuerySet[Job]:
        taken = Q(state="running", leased_until__isnull=False)
        return Job.objects.filter(Q(state="new") | taken)

    def process(self, job: Job, /) -> None:
        outside.perform(job.payload)


work = Work()
