"""A processor behind Celery's ``@shared_task``, in eager mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, shared_task
from kombu.utils import json as kombu_json

from dcl_processor import batch_processor
from tests.models import Parcel


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def send_parcels(row: Parcel) -> None:
    """Send the parcels that wait."""
    if row.note == "no address":
        raise ValueError("no address")


@shared_task  # type: ignore[untyped-decorator]  # celery ships no types
def send_parcels_task(limit: int | None = None) -> dict[str, Any]:
    """Send the parcels that wait, from beat."""
    return send_parcels.run(limit=limit).as_dict()


@pytest.fixture(autouse=True)
def app() -> Iterator[Celery]:
    app = Celery("tests", set_as_current=True)
    app.conf.update(
        task_always_eager=True, task_store_eager_result=True, result_backend="cache+memory://"
    )
    yield app
    app.close()


@pytest.mark.django_db(transaction=True)
def test_a_task_runs_the_processor_and_returns_its_report_as_json() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel(note="no address"), Parcel()])
    answer = send_parcels_task.delay().get()
    assert (answer["name"], answer["processed"], answer["failed"]) == ("tests.send_parcels", 2, 1)
    assert json.loads(json.dumps(answer)) == answer
    assert Parcel.objects.filter(sent=True).count() == 2


@pytest.mark.django_db(transaction=True)
def test_the_parameters_of_a_run_go_through_the_task() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])
    assert send_parcels_task.delay(limit=1).get()["stopped"] == "limit"


@pytest.mark.django_db(transaction=True)
def test_a_report_is_serialised_by_kombu_itself() -> None:
    Parcel.objects.create()
    report = send_parcels()
    text = kombu_json.dumps(report)  # type: ignore[no-untyped-call]  # kombu ships half its types
    assert json.loads(text) == report.as_dict()


def test_the_processor_has_the_functions_name_and_doc() -> None:
    assert send_parcels.__name__ == "send_parcels"
    assert send_parcels.__doc__ == "Send the parcels that wait."
    assert send_parcels.__module__ == __name__
