"""A processor behind Celery's ``@shared_task``, and the task for all of them, in eager mode.

``tests/cluster`` has the real workers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab
from django.test import override_settings

from dcl_processor import batch_processor
from dcl_processor.contrib.celery import every, polite_stop, run
from dcl_processor.exceptions import InvalidOption, RowsFailed, StillPending, UnknownProcessor
from tests.environments import CHECKOUT
from tests.models import Parcel


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


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
def test_the_task_runs_a_processor_by_name_and_returns_its_report_as_json() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel(note="no address"), Parcel()])
    answer = run.delay("tests.send_parcels").get()
    assert (answer["processed"], answer["failed"], answer["ok"]) == (2, 1, False)
    assert json.loads(json.dumps(answer)) == answer
    # The row that failed, and no others.
    with pytest.raises(RowsFailed, match="1 failed"):
        run.delay("tests.send_parcels", raise_for_failures=True).get()


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
def test_the_parameters_of_the_task_are_those_of_a_run() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])
    assert run.delay("tests.send_parcels", limit=1).get()["stopped"] == "limit"
    assert run.delay("tests.send_parcels", timeout=0).get()["stopped"] == "timeout"
    assert run.delay("tests.send_parcels", using="default", concurrency=1).get()["processed"] == 1


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [None, 7, 2, 1, 0])
def test_copies_share_what_there_is(limit: int | None) -> None:
    Parcel.objects.bulk_create(Parcel() for _ in range(10))
    run.delay("tests.send_parcels", workers=3, limit=limit).get()
    assert Parcel.objects.filter(sent=True).count() == (10 if limit is None else limit)


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
def test_no_more_tasks_are_sent_than_max_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a limit that such a task had would be lost."""
    monkeypatch.setattr(send_parcels, "max_in_flight", 1)
    Parcel.objects.bulk_create(Parcel() for _ in range(10))
    report = run.delay("tests.send_parcels", workers=3, limit=7).get()
    assert (report["processed"], report["stopped"]) == (7, "limit")


@pytest.mark.django_db(transaction=True)
def test_what_a_user_did_wrong_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UnknownProcessor, match=r"expected the name of a processor, .* got 'nothing'"
    ):
        run.delay("nothing").get()
    (said,) = [each for each in caplog.records if each.name == "dcl_processor"]
    assert said.levelname == "ERROR"
    assert said.exc_info is None
    assert said.getMessage().startswith("expected the name of a processor, one of ")


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"workers": 0}, "workers to be a whole number of tasks from 1 to 256, got 0"),
        ({"workers": 2, "limit": "all"}, "limit to be a whole number of rows from 0"),
        ({"workers": 2, "timeout": "1m"}, "timeout to be a number of seconds from 0"),
        ({"workers": 2, "wait_for_locked": -1}, "wait_for_locked to be a number of seconds from 0"),
        ({"workers": 2, "concurrency": 0}, "concurrency to be a whole number of handlers from 1"),
    ],
)
def test_parameters_that_cannot_work_are_refused(
    caplog: pytest.LogCaptureFixture, wrong: dict[str, Any], words: str
) -> None:
    """Once: by the first worker, before it sends others that would be refused as well."""
    Parcel.objects.bulk_create([Parcel(), Parcel()])
    with pytest.raises(InvalidOption, match=words):
        run.delay("tests.send_parcels", **wrong).get()
    assert [each.name for each in caplog.records].count("dcl_processor") == 1


@pytest.mark.usefixtures("known")
@pytest.mark.django_db(transaction=True)
def test_a_message_may_ask_for_what_the_settings_list_and_for_nothing_else() -> None:
    name = send_parcels.name
    with override_settings(DCL_PROCESSOR_TASK_NAMES=[name], DCL_PROCESSOR_TASK_DATABASES=[]):
        assert run.delay(name).get()["processed"] == 0
        with pytest.raises(InvalidOption, match=r"in the setting DCL_PROCESSOR_TASK_DATABASES"):
            run.delay(name, using="default").get()
        with pytest.raises(InvalidOption, match=r"TASK_NAMES, got 'shop\.send'"):
            run.delay("shop.send").get()


@pytest.mark.django_db(transaction=True)
def test_an_error_of_the_definition_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"tries": 1})
    found = {"tests.wrong": wrong(lambda row: None)}
    monkeypatch.setattr("dcl_processor.operator.registry.processors", lambda: found)
    Parcel.objects.create()
    with pytest.raises(StillPending):
        run.delay("tests.wrong").get()


def test_an_entry_for_beat_has_a_budget_below_its_interval_and_expires_with_it() -> None:
    assert every(60, "shop.send", workers=4, queue="mail") == {
        "task": "dcl_processor.run",
        "schedule": 60,
        "args": ("shop.send",),
        "kwargs": {"workers": 4, "timeout": 54.0},
        "options": {"expires": 60.0, "queue": "mail"},
    }
    assert every(timedelta(minutes=1), "shop.send", timeout=30)["kwargs"]["timeout"] == 30.0
    nightly = every(crontab(hour=2, minute=0), "shop.send", timeout=timedelta(hours=1), limit=5)
    assert nightly["kwargs"] == {"workers": 1, "timeout": 3600.0, "limit": 5}
    assert nightly["options"] == {"expires": 3600.0}
    waits: dict[str, Any] = {"wait_for_locked": timedelta(seconds=5)}
    patient = every(60, "shop.send", limit=9, **waits)
    in_seconds = {"wait_for_locked": 5.0}
    assert patient["kwargs"] == {"workers": 1, "timeout": 54.0, "limit": 9, **in_seconds}
    json.dumps([nightly["kwargs"], patient["kwargs"]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"schedule": 0}, "schedule to be a number of seconds above 0, or a timedelta, got 0"),
        ({"schedule": crontab()}, "timeout=… with a schedule that is not a number of seconds"),
        ({"timeout": "60"}, "timeout to be a number of seconds above 0, or a timedelta, got '60'"),
        ({"workers": 1.5}, "workers to be a whole number of tasks from 1 to 256, got 1.5"),
        ({"rows": 5}, "only the parameters limit, .*, got rows"),
        ({"limit": "all"}, "limit to be a whole number of rows from 0, got 'all'"),
        ({"wait_for_locked": -1}, "wait_for_locked to be a number of seconds from 0"),
        ({"concurrency": 0}, "concurrency to be a whole number of handlers from 1 to 10000, got 0"),
    ],
)
def test_an_entry_that_cannot_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        every(**{"schedule": 60, "name": "shop.send", **wrong})


def test_outside_a_pool_signals_are_left_alone() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with polite_stop() as stop:
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before
        assert not stop.is_set()
        stop.set()
        assert stop.wait(60)


def test_a_project_may_import_it_before_its_settings() -> None:
    """As the ``celery.py`` of a project is, which Django itself imports."""
    code = "from dcl_processor.contrib.celery import every; print(every(60, 'a.b')['task'])"
    variables = {key: value for key, value in os.environ.items() if "DJANGO" not in key}
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env={**variables, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("dcl_processor.run\n", "")
