"""The metrics of commands, of programs with several processes, and of the database."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.db import connection
from django.test import RequestFactory
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

import dcl_processor.contrib
from dcl_processor import metrics, observers, registry
from dcl_processor.contrib import prometheus
from dcl_processor.contrib.prometheus import exposition
from dcl_processor.contrib.prometheus.exposition import Counts
from dcl_processor.management import metering
from dcl_processor.metrics import Samples, sent
from dcl_processor.processes import pool
from dcl_processor.processes.graceful_stop import Stop
from tests.edge.manage import CHECKOUT, Install, Manage, python, started
from tests.edge.watchers import parcels
from tests.models import Parcel
from tests.waiting import PATIENCE, until, wait
from tests.warehouse.processors import deliver

pytestmark = pytest.mark.django_db(transaction=True)

MONITORING = Path(dcl_processor.contrib.__path__[0]) / "monitoring"
DOWN = "postgres://nothing@127.0.0.1:1/none"


def full(name: str = "shop.a", success: float = 1_700_000_000.0) -> Samples:
    """Return samples in which each metric has a value."""
    own = Counts([name])
    for _ in range(5):
        own.row_ended(name, "processed", is_retried=False)
    for outcome in ("failed", "discarded", "snoozed", "lease_lost"):
        own.row_ended(name, outcome, is_retried=outcome == "failed")
    for each in (0.0005, 0.3, 7.0, 1_000_000.0):
        own.unlocked(name, each)
        own.claimed(name, [each])
        own._handler.labels(name).observe(each)
    own._success.labels(name).set(success)
    return own.samples()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the values of an exposition, by the sample's name and its labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
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


def processed(found: Samples, name: str) -> float:
    return found.get((f"{metrics.ROWS}_total", (("outcome", "processed"), ("processor", name))), 0)


def test_what_workers_send_is_added_up() -> None:
    later = 1_800_000_000.0
    counts = Counts()
    for each in (full(), full("shop.b"), full(success=later)):
        counts.add(each)
    twice = {
        key: value if value == later else 2 * value for key, value in full(success=later).items()
    }
    assert counts.samples() == {**twice, **full("shop.b")}


def test_a_value_at_a_bound_is_in_its_bucket() -> None:
    counts = Counts()
    for each in (0.5, 1.0, 1.5):
        counts.unlocked("shop.a", each)
    below = (("le", "1.0"), ("processor", "shop.a"))
    assert counts.samples()[f"{exposition.LOCK}_bucket", below] == 2


def test_counts_are_sent_at_most_once_a_second_and_at_the_end() -> None:
    messages: list[Samples] = []
    began = time.monotonic()
    with sent(messages.append, Counts()):
        for _ in range(50):
            observers.tell("row_ended", "shop.a", "processed", is_retried=False)
    assert sum(processed(each, "shop.a") for each in messages) == 50
    assert len(messages) <= 2 + (time.monotonic() - began)
    assert observers.active == ()


def test_counts_of_a_worker_that_waits_for_its_next_row_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else happens in its process for as long as a watch waits."""
    monkeypatch.setattr(metrics, "INTERVAL", 0.01)
    arrived = threading.Event()
    messages: list[Samples] = []

    def send(new: Samples) -> None:
        messages.append(new)
        arrived.set()

    with sent(send, Counts()):
        observers.tell("row_ended", "shop.a", "processed", is_retried=False)
        wait(arrived)
    assert [processed(each, "shop.a") for each in messages] == [1]


def test_the_workers_of_a_command_are_counted_by_their_parent(installed: None) -> None:
    parcels(*[""] * 5, "broken")
    counts = Counts()
    pool.run(deliver, workers=2, stop=Stop(), on_counts=counts.add)
    found = counts.samples()
    assert processed(found, deliver.name) == 5
    names = {name for name, _ in found}
    assert f"{exposition.HANDLER}_count" in names


# --- the port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
        return text


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_watch_serves_the_counts_of_its_copies(installed: None) -> None:
    parcels(*[""] * 4)
    port = free_port()
    watch = ("run", "warehouse.deliver", "--watch", "0.1", "--workers", "2")
    with started(*watch, "--metrics-port", str(port)) as process:
        until(lambda: is_served(port), "the port")
        until(lambda: rows(scrape(port)) == {"processed": 4}, "the counts")
        success = "dcl_processor_last_success_timestamp_seconds"
        until(lambda: success in samples(scrape(port)), "the success")
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_port_that_is_taken_is_refused(manage: Manage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = manage("run", "warehouse.deliver", "--metrics-port", str(port))
    assert done.code == 2
    assert f"got 127.0.0.1:{port}" in done.err


def test_an_address_may_come_before_the_port() -> None:
    assert metering.address("9102") == ("127.0.0.1", 9102)
    assert metering.address("0.0.0.0:9102") == ("0.0.0.0", 9102)  # noqa: S104  # not bound
    assert metering.address("[::]:9102") == ("::", 9102)


# --- several processes of another program

WORKER = """
import django
django.setup()
from dcl_processor.contrib import prometheus
from tests.warehouse.processors import deliver
prometheus.register()
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


def test_a_program_adds_the_metrics_to_its_registry(
    monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    monkeypatch.setattr(prometheus, "_registered", None)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    own_registry = CollectorRegistry()
    prometheus.register(own_registry)
    prometheus.register(own_registry)
    try:
        parcels("")
        deliver.run()
        assert rows(generate_latest(own_registry).decode()) == {"processed": 1}
    finally:
        assert prometheus._registered is not None
        observers.remove(prometheus._registered)


# --- the database


def gauges_of(*names: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    own = CollectorRegistry()
    own.register(prometheus.Gauges(lambda: registry.get(names)))
    return samples(generate_latest(own).decode())


def test_what_the_database_knows_is_read(installed: None) -> None:
    parcels("", "")
    found = gauges_of("warehouse.deliver")
    own = (("processor", "warehouse.deliver"),)
    assert found == {
        "dcl_processor_pending_rows": {own: 2.0},
        "dcl_processor_in_doubt_rows": {own: 0.0},
        "dcl_processor_given_up_rows": {own: 0.0},
        "dcl_processor_unknown_gauges": {own: 0.0},
    }


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
    empty = gauges_of("aged.old")
    parcels("")
    began = time.monotonic()
    one = gauges_of("aged.old")
    took = time.monotonic() - began
    name, own = "dcl_processor_oldest_pending_age_seconds", (("processor", "aged.old"),)
    assert empty[name] == {own: 0.0}
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


def test_more_rows_than_are_counted_are_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcl_processor.insights.answer import Answer, How

    assert prometheus._value(Answer(10_000, How.MORE_THAN)) == 10_001.0
    assert prometheus._value(Answer(10_000)) == 10_000.0
    assert prometheus._value(Answer.unknown("why")) is None
    assert prometheus._value(Answer.not_recorded("why")) is None


def test_a_scrape_within_the_time_sends_no_query(
    installed: None, django_assert_num_queries: Any
) -> None:
    parcels("")
    found = prometheus.Gauges(lambda: [deliver])
    first = [each.samples for each in found.collect()]
    with django_assert_num_queries(0):
        assert [each.samples for each in found.collect()] == first
    found._read_at = time.monotonic() - prometheus.FRESH_FOR
    parcels("")
    [pending, *_] = found.collect()
    assert [sample.value for sample in pending.samples] == [2.0]


def test_the_view_answers_in_the_format_that_is_asked_for(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels("")
    own = CollectorRegistry()
    own.register(prometheus.Gauges(lambda: registry.processors().values()))
    monkeypatch.setattr(prometheus, "_gauges", own)
    plain = prometheus.gauges_view(RequestFactory().get("/metrics"))
    assert plain.status_code == 200
    assert plain["Content-Type"].startswith("text/plain")
    found = samples(plain.content.decode())["dcl_processor_pending_rows"]
    assert found[("processor", "warehouse.deliver"),] == 1.0
    accept = "application/openmetrics-text; version=1.0.0"
    other = prometheus.gauges_view(RequestFactory().get("/metrics", headers={"Accept": accept}))
    assert other["Content-Type"].startswith("application/openmetrics-text")
    assert connection.in_atomic_block is False


def test_without_the_client_the_command_says_what_is_missing(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = manage("run", "warehouse.deliver", "--metrics-port", "9102")
    assert done.code == 2
    assert "install dcl-processor[prometheus]" in done.err


def test_a_run_without_the_options_imports_no_metrics_answers_ledger_or_page() -> None:
    code = (
        "import sys, django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('processors', 'run', 'warehouse.deliver')\n"
        "print(*[each for each in sys.modules if each.startswith(('celery', 'prometheus_client', "
        "'opentelemetry', 'dcl_processor.metrics', 'dcl_processor.contrib', "
        "'dcl_processor.insights', 'dcl_processor.ledger', 'dcl_processor.admin_page'))])"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# --- the dashboard and the alerts

QUERY = re.compile(r"dcl_processor_\w+")


def exposed() -> dict[str, set[str]]:
    """Return the samples of all metrics with the names of their labels."""
    metrics = [*exposition.families(full()), *every_gauge()]
    found: dict[str, set[str]] = {}
    for metric in metrics:
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def every_gauge() -> Iterator[Any]:
    from dcl_processor.insights.answer import Answer
    from dcl_processor.insights.status import Status

    answers = {name: Answer(1) for name in prometheus.GAUGES}
    return prometheus.gauges([Status("shop.a", "transactional", "default", answers)])


def expressions() -> Iterable[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for each in dashboard["templating"]["list"]:
        if each["type"] == "query":
            yield each["query"]["query"]
    yield from (rule["expr"] for rule in alerts())


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def labels_of(expression: str) -> set[str]:
    """Return the labels that an expression selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    values = re.findall(r"label_values\(\w+, (\w+)\)", expression)
    return {*selected, *values, *(each.strip() for group in grouped for each in group.split(","))}


def test_each_metric_and_label_of_the_dashboard_and_the_alerts_is_exposed() -> None:
    known = exposed()
    found = list(expressions())
    assert len(found) > 20
    for each in found:
        names = QUERY.findall(each)
        assert names, each
        assert {*names} <= known.keys(), each
        assert labels_of(each) <= set.union(*(known[name] for name in names)), each


def test_each_alert_is_complete_and_on_the_page(tmp_path: Path) -> None:
    found = alerts()
    assert len({rule["alert"] for rule in found}) == len(found) == 10
    page = (CHECKOUT / "docs/howto/monitoring.md").read_text()
    for rule in found:
        assert f"| `{rule['alert']}` |" in page
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"page", "ticket"}
    # And it fires for what it says, where Prometheus is installed.
    for each in (MONITORING / "alerts.yml", Path(__file__).parent / "alerts_test.yml"):
        shutil.copy(each, tmp_path)
    if promtool := shutil.which("promtool"):
        command = [promtool, "test", "rules", str(tmp_path / "alerts_test.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_metric_is_on_the_dashboard() -> None:
    shown = {name for each in expressions() for name in QUERY.findall(each)}
    families = {metric.name for metric in exposition.families({})} | {
        *(name for name, _ in prometheus.GAUGES.values()),
        prometheus.UNKNOWN,
    }
    assert families == {re.sub(r"_(total|bucket|sum)$", "", name) for name in shown}


def test_no_label_has_a_key_a_host_or_a_message() -> None:
    assert set.union(*exposed().values()) == {"processor", "outcome", "le"}


def test_a_host_that_cannot_be_is_a_mistake_in_the_command_line(manage: Manage) -> None:
    parcels("")
    done = manage("run", "warehouse.deliver", "--metrics-port", "a..b:9100")
    assert done.code == 2
    assert "--metrics-port" in done.err
    assert "Traceback" not in done.err
    assert Parcel.objects.filter(sent=False).count() == 1
