from __future__ import annotations

import logging
from collections import Counter
from datetime import timedelta

from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Job

logger = logging.getLogger(__name__)

MOST_PER_KIND, MOST_ATTEMPTS = 2, 3
BACKOFF, LEASE = timedelta(seconds=60), timedelta(minutes=5)
COUNTING = 7_101


def work() -> None:
    while (job := claim()) is not None:
        try:
            outside.perform(job.payload)
        except Exception as error:
            logger.exception("job %s failed", job.pk)
            fail(job, error)
        else:
            settle(job, "done")


def claim() -> Job | None:
    now = timezone.now()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [COUNTING])
        alive = Job.objects.filter(state="running", leased_until__gte=now)
        running = Counter(alive.values_list("kind", flat=True))
        full = [kind for kind, number in running.items() if number >= MOST_PER_KIND]
        is_due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=now)
        job = (
            Job.objects.select_for_update(skip_locked=True)
            .filter(Q(state="new") & is_due | Q(state="running", leased_until__lt=now))
            .filter(attempts__lt=MOST_ATTEMPTS)
            .exclude(kind__in=full)
            .order_by("pk")
            .first()
        )
        if job is not None:
            job.state, job.worker = "running", outside.worker()
            job.attempts, job.leased_until = job.attempts + 1, now + LEASE
            job.save(update_fields=["state", "worker", "attempts", "leased_until"])
    return job


def fail(job: Job, error: Exception) -> None:
    job.last_error = repr(error)
    if job.attempts >= MOST_ATTEMPTS:
        settle(job, "failed")
    else:
        job.next_attempt_at = timezone.now() + BACKOFF * 2 ** (job.attempts - 1)
        settle(job, "new")


def settle(job: Job, state: str) -> None:
    ours = Job.objects.filter(pk=job.pk, worker=job.worker, leased_until=job.leased_until)
    ours.update(
        state=state,
        leased_until=None,
        next_attempt_at=job.next_attempt_at,
        last_error=job.last_error,
    )
