"""How an operator recognises a worker: by the sessions of the database."""

from __future__ import annotations

import socket
import threading
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoAssertNumQueries

from dcl_processor.workers.visible import label, named_sessions
from tests.edge.manage import started
from tests.edge.watchers import parcels
from tests.gates import at_gate
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DELIVER = "warehouse.deliver"
HOST = socket.gethostname()[:8]


def names() -> set[str]:
    """Return the names of the sessions of workers in this database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE '%%dcl %%'"
        )
        return {name for (name,) in cursor.fetchall()}


def own_name(alias: str = "default") -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW application_name")
        (name,) = cursor.fetchone()
        return str(name)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_sessions_of_a_worker_have_its_name_while_it_works(gate: Path, workers: int) -> None:
    parcels("gate", "gate", "")
    more = {"GATE": str(gate)}
    with started("run", DELIVER, "--workers", str(workers), **more) as process:
        at_gate(gate, handlers=workers)
        found = names()
        (gate / "open").touch()
        process.communicate(timeout=PATIENCE)
    numbers = [f" {number}/{workers}" if workers > 1 else "" for number in range(1, workers + 1)]
    assert found == {f"dcl {DELIVER}{number} {HOST}" for number in numbers}


def test_only_sessions_that_are_opened_in_the_block_have_the_name(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    """Those of other threads, too; no statement is sent for it."""
    found: list[str] = []

    def in_a_thread() -> None:
        found.append(own_name())
        connection.close()

    before = own_name()
    with named_sessions("shop.send"):
        assert own_name() == before == ""
        connection.close()
        connection.ensure_connection()
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        with django_assert_num_queries(1):
            assert found == [own_name()] == [f"dcl shop.send {HOST}"]
    connection.close()
    assert own_name() == own_name("other") == ""


def test_a_program_that_calls_the_command_keeps_the_names_of_its_sessions(installed: None) -> None:
    """Its other threads may open sessions meanwhile, and its pool may keep those of the run."""
    connection.close()
    call_command("processors", "run", DELIVER, stdout=StringIO())
    assert own_name() == ""
    connection.close()


def test_a_name_of_the_project_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    connection.close()
    monkeypatch.setenv("PGAPPNAME", "shop")
    with named_sessions("shop.send"):
        assert own_name() == "shop"
    connection.close()
    monkeypatch.delenv("PGAPPNAME")
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "application_name", "shop web")
    with named_sessions("shop.send"):
        assert own_name() == "shop web"
    connection.close()


@pytest.mark.parametrize("work", ["a" * 200 + " 12/64", "é" * 50 + " 12/64"])
def test_a_long_name_keeps_the_number_of_the_worker_and_the_host(work: str) -> None:
    connection.close()
    with named_sessions(work):
        name = own_name()
    connection.close()
    assert name.startswith("dcl ")
    assert name.endswith(f" 12/64 {HOST}")


def test_a_worker_of_several_processors_has_their_number() -> None:
    assert label(["shop.send", "shop.note"], 2, 4) == "2 processors 2/4"
    assert label(["shop.send"]) == "shop.send"
