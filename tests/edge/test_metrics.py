"""The metrics of commands, of programs with several processes, and of the database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from django.db import connection
from django.test import RequestFactory
from django.utils import timezone
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

import dcl_processor.contrib
from dcl_processor import Retry, Snooze
from dcl_processor.contrib import prometheus
from dcl_processor.report.observer import observers_installed
from tests.contract.support import errands as the
from tests.edge.manage import Install, python
from tests.edge.watchers import parcels
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

MONITORING = Path(dcl_processor.contrib.__path__[0]) / "monitoring"
DOWN = "postgres://nothing@127.0.0.1:1/none"


Labels = tuple[tuple[str, str], ...]


def samples(text: str) -> dict[str, dict[Labels, float]]:
    """Return the values of an exposition, by the sample's name and its labels."""
    found: dict[str, dict[Labels, float]] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def rows(text: str, name: str = "warehouse.deliver") -> dict[str, float]:
    """Return the numbers of rows by outcome, those that are 0 left out."""
    found = samples(text).get("dcl_processor_rows_total", {})
    numbers = {
        dict(labels)["outcome"]: n for labels, n in found.items() if ("processor", name) in labels
    }
    return {outcome: number for outcome, number in numbers.items() if number}


# --- counting


@pytest.fixture
def counted() -> Iterator[Callable[[], dict[str, dict[Labels, float]]]]:
    """Count what runs do, and yield what returns the samples."""
    own = CollectorRegistry()
    counts = prometheus.Counts(own)
    observers_installed.append(look_on := lambda _: counts)
    yield lambda: samples(generate_latest(own).decode())
    observers_installed.remove(look_on)


Counted = Callable[[], dict[str, dict[Labels, float]]]


def test_outcomes_retries_and_lost_leases_are_counted(counted: Counted) -> None:
    the.errands(4)

    def handle(row: Errand) -> None:
        match row.place:
            case 0:
                raise ValueError
            case 1:
                raise Snooze(delay=60)
            case 2:
                Errand.objects.filter(pk=row.pk).update(leased_until=None)

    retry = Retry(3, backoff=60, jitter=0)
    the.at_least_once(handle, name="shop.outcomes", retry=retry).run()
    found, own = counted(), (("processor", "shop.outcomes"),)
    rows = {dict(each)["outcome"]: n for each, n in found["dcl_processor_rows_total"].items()}
    assert rows == {"processed": 1, "failed": 1, "snoozed": 1, "discarded": 0}
    assert found["dcl_processor_retries_total"][own] == 1
    assert found["dcl_processor_lost_leases_total"][own] == 1
    assert found["dcl_processor_handler_duration_seconds_count"][own] == 3
    # The row that failed is to be tried again.
    assert own in found["dcl_processor_last_success_timestamp_seconds"]


def test_the_age_of_a_row_is_measured_when_its_handler_is_called(counted: Counted) -> None:
    the.errands(1, claimed_at=timezone.now() - timedelta(minutes=5))
    the.errands(1, claimed_at=None)
    the.transactional(the.ignore, name="shop.age", pending_since="claimed_at").run()
    found, own = counted(), (("processor", "shop.age"),)
    assert found["dcl_processor_age_at_start_seconds_count"][own] == 1
    assert 299.0 < found["dcl_processor_age_at_start_seconds_sum"][own] < 330.0


def test_a_run_in_which_a_row_fails_for_good_is_no_success(counted: Counted) -> None:
    the.errands(1)
    the.transactional(the.raising(ValueError()), name="shop.bad").run()
    found = counted()
    assert found["dcl_processor_rows_total"][("outcome", "failed"), ("processor", "shop.bad")] == 1
    assert "dcl_processor_last_success_timestamp_seconds" not in found


# --- several processes of another program

WORKER = """
import django
django.setup()
from dcl_processor.contrib import prometheus
from tests.warehouse.processors import deliver
prometheus.register()
print(deliver.run(limit=2))
"""


def test_the_multi_process_mode_of_the_client_works(tmp_path: Path, installed: None) -> None:
    parcels(*[""] * 4)
    for _ in range(2):
        ended = python("-c", WORKER, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
        assert ended.returncode == 0, ended.stderr
    own_registry = CollectorRegistry()
    MultiProcessCollector(own_registry, path=str(tmp_path))  # type: ignore[no-untyped-call]  # it has no types
    text = generate_latest(own_registry).decode()
    assert rows(text) == {"processed": 4}
    found = samples(text)
    [handled] = found["dcl_processor_handler_duration_seconds_count"].values()
    assert handled == 4
    [success] = found["dcl_processor_last_success_timestamp_seconds"].items()
    assert success[0] == (("processor", "warehouse.deliver"),)  # and not of each process
    assert time.time() - 60 < success[1] <= time.time()


# --- the database


def gauges() -> dict[str, dict[Labels, float]]:
    answer = prometheus.gauges_view(RequestFactory().get("/metrics"))
    assert answer["Content-Type"].startswith("text/plain")
    return samples(answer.content.decode())


def test_what_the_database_knows_is_read(installed: None) -> None:
    parcels("", "")
    own = (("processor", "warehouse.deliver"),)
    found = {name: values[own] for name, values in gauges().items() if own in values}
    assert found == {
        "dcl_processor_pending_rows": 2.0,
        "dcl_processor_in_doubt_rows": 0.0,
        "dcl_processor_given_up_rows": 0.0,
        "dcl_processor_unknown_gauges": 0.0,
    }
    assert connection.in_atomic_block is False


def test_the_age_of_the_oldest_row_is_a_gauge(install: Install) -> None:
    install(
        "aged",
        """
        from django.db.models.functions import Now
        from datetime import timedelta
        since = Now() - timedelta(seconds=90)

        @batch_processor(
            pending=Parcel.objects.filter(sent=False), done={"sent": True}, pending_since=since
        )
        def old(parcel):
            pass
        """,
    )
    empty = gauges()
    parcels("")
    began = time.monotonic()
    one = gauges()
    took = time.monotonic() - began
    name, own = "dcl_processor_oldest_pending_age_seconds", (("processor", "aged.old"),)
    assert empty[name][own] == 0.0
    assert 89.0 < one[name][own] < 91.0 + took


def test_a_gauge_that_could_not_be_read_is_absent() -> None:
    code = (
        "import django; django.setup()\n"
        "from dcl_processor.contrib.prometheus import gauges_view\n"
        "from django.test import RequestFactory\n"
        "print(gauges_view(RequestFactory().get('/metrics')).content.decode())"
    )
    done = python("-c", code, DATABASE_URL=DOWN)
    assert done.returncode == 0, done.stderr
    found = samples(done.stdout)
    own = (("processor", "warehouse.deliver"),)
    assert {*found} == {"dcl_processor_unknown_gauges"}
    assert found["dcl_processor_unknown_gauges"][own] == 4.0


def test_a_run_without_the_options_imports_no_metrics_ledger_or_page() -> None:
    code = (
        "import sys, django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('processors', 'run', 'warehouse.deliver')\n"
        "print(*[each for each in sys.modules if each.startswith(('celery', 'prometheus_client', "
        "'opentelemetry', 'dcl_processor.contrib', "
        "'dcl_processor.ledger.models', 'dcl_processor.admin_page'))])"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# --- the dashboard and the alerts


def asked_for(file: str) -> set[str]:
    """Return the metrics that a file names, without what is added for each kind of sample."""
    found = re.findall(r"dcl_processor_\w+", (MONITORING / file).read_text())
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in found}


def test_the_dashboard_and_the_alerts_ask_for_each_metric_and_for_no_other() -> None:
    own = CollectorRegistry()
    prometheus.Counts(own)
    exposed = {each.name for each in (*own.collect(), *prometheus.gauges([]))}
    assert asked_for("dashboard.json") | asked_for("alerts.yml") == exposed


def test_each_alert_is_complete() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == 9
    for rule in group["rules"]:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"page", "ticket"}
