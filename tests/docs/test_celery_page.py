"""Copy the page on Celery into an empty folder; start its worker and its beat on a real Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db import connection

from tests.cluster.processes import in_a_group
from tests.docs.reader import Reader, connected, empty_database
from tests.servers.redis import is_installed, redis
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="redis-server is not installed")


@pytest.fixture
def variables(transactional_db: None) -> Iterator[dict[str, str]]:
    """Give the variables that the page names: where Redis is, and where an empty database is."""
    settings = connection.settings_dict
    with redis() as url, empty_database("celery") as name:
        yield {
            "REDIS_URL": url,
            "PGHOST": settings["HOST"],
            "PGPORT": str(settings["PORT"] or 5432),
            "PGUSER": settings["USER"],
            "PGPASSWORD": settings["PASSWORD"],
            "PGDATABASE": name,
        }


@contextmanager
def started(reader: Reader, command: str) -> Iterator[Path]:
    """Start what stays; give its log."""
    log = reader.folder / f"{command.split()[3]}.log"
    shell = ["/bin/sh", "-c", f"exec {command}"]
    with in_a_group(shell, log, cwd=reader.folder, env=reader.environment) as running:
        yield log
        assert running.process.poll() is None, log.read_text()


def unsent(name: str) -> int:
    with connected(name) as ours, ours.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM shop_order WHERE NOT shipped_email_sent")
        return int(cursor.fetchone()[0])


def test_a_worker_and_beat_as_the_page_has_them_handle_each_row_once(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    name = variables["PGDATABASE"]
    reader = Reader("howto/celery.md", tmp_path, variables)
    reader.follow()
    worker, beat = [start for start in reader.starts if start.startswith("celery ")]
    assert unsent(name) == 20
    with started(reader, worker) as log, started(reader, beat):
        until(lambda: unsent(name) == 0, f"all mails to be sent ({log})", pause=0.1)
        until(lambda: " succeeded in " in log.read_text(), f"the end of a task ({log})")
        said = re.findall(r"Order (\d+) is on its way", log.read_text())
        assert sorted(map(int, said)) == list(range(1, 21))
