"""django-tasks-db: its own worker with ``--batch``, which ends when there is nothing to do."""

from __future__ import annotations

from django.core.management import call_command
from django_tasks import task
from django_tasks_db.models import DBTaskResult

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import settle_down


@task()
def errand(number: int) -> None:
    handling.handle(number)


def prepare(jobs: int) -> None:
    DBTaskResult.objects.all().delete()
    for number in range(1, jobs + 1):
        errand.enqueue(number)
    settle_down(DBTaskResult._meta.db_table)


def drain(workers: int) -> Drained:
    call_command("db_worker", batch=True, startup_delay=False, verbosity=0)
    return Drained()


def left() -> int:
    return int(DBTaskResult.objects.exclude(status="SUCCESSFUL").count())
