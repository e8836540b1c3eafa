from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Task

logger = logging.getLogger(__name__)

MOST_ATTEMPTS, BACKOFF, LEASE = 3, timedelta(seconds=60), timedelta(minutes=5)

CLAIM_TASK = """
CREATE OR REPLACE FUNCTION claim_task(lease interval, most integer)
RETURNS SETOF ported_task LANGUAGE plpgsql AS $$
BEGIN
    UPDATE ported_task SET state = 'failed', last_error = 'its worker died', leased_until = NULL
    WHERE state = 'queued' AND attempts >= most AND leased_until < now();
    RETURN QUERY
    UPDATE ported_task SET attempts = attempts + 1, leased_until = now() + lease
    WHERE id = (
        SELECT id FROM ported_task
        WHERE state = 'queued' AND attempts < most
          AND (leased_until IS NULL OR leased_until < now())
          AND (next_attempt_at IS NULL OR next_attempt_at <= now())
        ORDER BY priority DESC, id
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    RETURNING *;
END $$
"""


def work() -> None:
    while (task := claim()) is not None:
        try:
            outside.perform(task.payload)
        except Exception as error:
            logger.exception("task %s failed", task.pk)
            fail(task, error)
        else:
            ours(task).update(state="done", leased_until=None)


def claim() -> Task | None:
    claimed = Task.objects.raw("SELECT * FROM claim_task(%s, %s)", [LEASE, MOST_ATTEMPTS])
    return next(iter(claimed), None)


def fail(task: Task, error: Exception) -> None:
    written: dict[str, Any] = {"last_error": repr(error), "leased_until": None}
    if task.attempts >= MOST_ATTEMPTS:
        written["state"] = "failed"
    else:
        written["next_attempt_at"] = timezone.now() + BACKOFF * 2 ** (task.attempts - 1)
    ours(task).update(**written)


def ours(task: Task) -> QuerySet[Task]:
    return Task.objects.filter(pk=task.pk, leased_until=task.leased_until)
