"""Start the worker and the beat of the page on Celery, with a recipe's project and a real Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import in_a_group
from tests.databases import database_url
from tests.docs.reader import Reader, append, connected, empty_database, project
from tests.servers.redis import is_installed, redis
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="redis-server is not installed")

#: What Celery's documentation has for Django.
CELERY = """
import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "office.settings")

app = Celery("office")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""

BROKER = """
CELERY_BROKER_URL = "{}"
"""

PAYMENTS = (
    "INSERT INTO payments_payment (card, amount, created_at, state, charge_id)"
    " SELECT 'good', 10, now(), 'due', '' FROM generate_series(1, 20)"
)


@contextmanager
def started(reader: Reader, command: str) -> Iterator[Path]:
    """Start what stays; give its log."""
    log = reader.folder / f"{command.split()[3]}.log"
    shell = ["/bin/sh", "-c", f"exec {command}"]
    with in_a_group(shell, log, cwd=reader.folder, env=reader.environment) as running:
        yield log
        assert running.process.poll() is None, log.read_text()


def processed(log: Path) -> int:
    """Return the rows in the reports that are the results of tasks."""
    return sum(map(int, re.findall(r" succeeded in .*'processed': (\d+)", log.read_text())))


@pytest.mark.django_db(transaction=True)
def test_a_worker_and_beat_as_the_page_has_them_handle_each_row_once(tmp_path: Path) -> None:
    with redis() as broker, empty_database("celery") as name, connected(name) as ours:
        project(tmp_path, "payments")
        append(tmp_path, BROKER.format(broker))
        (tmp_path / "office" / "__init__.py").write_text("from .celery import app\n")
        (tmp_path / "office" / "celery.py").write_text(CELERY)
        variables = {"DATABASE_URL": database_url(name)}
        Reader("recipes/charge.md", tmp_path, variables).write_files()
        reader = Reader("howto/celery.md", tmp_path, variables)
        reader.follow()
        reader.run("python manage.py makemigrations payments")
        reader.run("python manage.py migrate")
        worker, beat = reader.starts
        with ours.cursor() as cursor:
            cursor.execute(PAYMENTS)
            with started(reader, worker) as log, started(reader, beat):
                until(lambda: processed(log) >= 20, f"a charge for each row ({log})", pause=0.1)
            cursor.execute("SELECT DISTINCT state, charge_id = 'ch_' || id FROM payments_payment")
            assert cursor.fetchall() == [("paid", True)]
        assert processed(log) == 20
