"""A Redis, and a worker that most of these tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as NoResultError

from tests.cluster.processes import Started, worker
from tests.cluster.processors import PLAIN, WAITS
from tests.models import Errand, Parcel
from tests.servers.redis import is_installed, redis
from tests.waiting import PATIENCE, Late, until


@dataclass
class Cluster:
    """What the workers and the tests share: a broker, a folder, and Celery's app."""

    app: Celery
    folder: Path
    variables: dict[str, str]
    sent: list[Any] = field(default_factory=list)

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def send(self, options: Any = None) -> Any:
        """Send the task that runs the processor."""
        result = self.app.send_task("dcl_processor.run", ("cluster.deliver",), **(options or {}))
        self.sent.append(result)
        return result

    def open_gate(self) -> None:
        (self.gate / "open").touch()

    def effects(self) -> Counter[int]:
        """Count what cannot be taken back, by row."""
        return Counter(map(int, (self.folder / "audit").read_text().split()))

    def clear(self) -> None:
        for path in self.gate.iterdir():
            path.unlink()
        (self.folder / "audit").write_text("")
        self.app.control.purge()


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not is_installed():
        pytest.skip("redis-server is not installed (Debian's package of that name)")
    from tests.cluster.app import app

    folder = tmp_path_factory.mktemp("cluster")
    (folder / "gate").mkdir()
    with redis() as url:
        app.conf.broker_url = app.conf.result_backend = url
        variables = {"REDIS_URL": url, "GATE": str(folder / "gate"), "AUDIT": str(folder / "audit")}
        cluster = Cluster(app, folder, variables)
        yield cluster
        for result in cluster.sent:
            # One that outlives the server, in the traceback of a test, would ask it to forget it.
            result.backend = None
        app.close()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """Return the cluster with nothing left from the test before."""
    _cluster.clear()
    return _cluster


@pytest.fixture(scope="session")
def one(_cluster: Cluster, django_db_setup: None) -> Iterator[Started]:
    """Start a worker with two processes."""
    with worker(_cluster.folder, "one", variables=_cluster.variables) as started:
        yield started


def got(result: Any) -> Any:
    """Wait for the result of a task."""
    try:
        return result.get(PATIENCE)
    except NoResultError:
        raise Late(f"the result of {result}") from None


def first_waits() -> list[int]:
    """Have three rows, of which the first keeps its handler at the gate; return their keys."""
    rows = Errand.objects.bulk_create(Errand(place=each) for each in (WAITS, PLAIN, PLAIN))
    return [row.pk for row in rows]


def done() -> set[int]:
    return set(Errand.objects.filter(done=True).values_list("pk", flat=True))


def work() -> Counter[int]:
    """Count what handlers did in the transaction of their row."""
    return Counter(map(int, Parcel.objects.values_list("note", flat=True)))


def untouched(pks: list[int]) -> bool:
    """Tell whether these rows say what rows say that were never claimed."""
    return not Errand.objects.filter(pk__in=pks).exclude(
        done=False, claimed=False, claimed_at=None, leased_until=None, attempts=0
    )


def told_to_stop(cluster: Cluster) -> None:
    """Wait until the run of the handler at the gate knows that it is to stop."""
    until(lambda: any(cluster.gate.glob("stopping-*")), "the word to stop")
