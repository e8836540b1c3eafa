"""A processor behind Celery's ``@shared_task``, and the task for all of them, in eager mode.

``tests/cluster`` has the real workers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from celery import Celery
from django.test import override_settings

from dcl_processor import batch_processor
from dcl_processor.contrib.celery import polite_stop, run
from dcl_processor.exceptions import InvalidOption, RowsFailed, UnknownProcessor
from tests.models import Parcel

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("known")]


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def send_parcels(row: Parcel) -> None:
    """Send the parcels that wait."""
    if row.note == "no address":
        raise ValueError("no address")


@pytest.fixture(autouse=True)
def app() -> Iterator[Celery]:
    app = Celery("tests", set_as_current=True)
    app.conf.update(
        task_always_eager=True, task_store_eager_result=True, result_backend="cache+memory://"
    )
    yield app
    app.close()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processor above where processors are looked for."""
    found = {"tests.send_parcels": send_parcels}
    monkeypatch.setattr("dcl_processor.operator.registry.processors", lambda: found)


def test_the_task_runs_a_processor_by_name_and_returns_its_report_as_json() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel(note="no address"), Parcel()])
    answer = run.delay("tests.send_parcels").get()
    assert (answer["processed"], answer["failed"], answer["ok"]) == (2, 1, False)
    assert json.loads(json.dumps(answer)) == answer
    # The row that failed, and no others.
    with pytest.raises(RowsFailed, match="1 failed"):
        run.delay("tests.send_parcels", raise_for_failures=True).get()


def test_the_parameters_of_the_task_are_those_of_a_run() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])
    assert run.delay("tests.send_parcels", limit=1).get()["stopped"] == "limit"
    assert run.delay("tests.send_parcels", timeout=0).get()["stopped"] == "timeout"
    assert run.delay("tests.send_parcels", using="default", concurrency=1).get()["processed"] == 1


def test_an_error_of_the_run_fails_the_task() -> None:
    with pytest.raises(UnknownProcessor, match=r"expected the name of a processor, .* 'nothing'"):
        run.delay("nothing").get()


def test_a_message_may_ask_for_what_the_settings_list_and_for_nothing_else() -> None:
    name = send_parcels.name
    with override_settings(DCL_PROCESSOR_TASK_NAMES=[name], DCL_PROCESSOR_TASK_DATABASES=[]):
        assert run.delay(name).get()["processed"] == 0
        with pytest.raises(InvalidOption, match=r"in the setting DCL_PROCESSOR_TASK_DATABASES"):
            run.delay(name, using="default").get()
        with pytest.raises(InvalidOption, match=r"TASK_NAMES, got 'shop\.send'"):
            run.delay("shop.send").get()


def test_outside_a_pool_signals_are_left_alone() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with polite_stop() as stop:
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before
        assert not stop.is_set()
        stop.set()
        assert stop.wait(60)
