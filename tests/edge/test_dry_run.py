"""``manage.py processors run --dry-run``, and what the command says of a refused backlog."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.edge.conftest import HEAD
from tests.edge.manage import CHECKOUT, Install, Manage, processors
from tests.edge.watchers import parcels, watching
from tests.models import Parcel
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

CAREFUL = """
import os

def pending():
    with open(os.environ.get("LOOKS", os.devnull), "a") as looks:
        looks.write(".")
    return Parcel.objects.filter(sent=False)

@batch_processor(pending=pending, done={"sent": True}, max_pending=2)
def send(parcel):
    pass
"""
REFUSED = (
    "careful.send: expected at most max_pending=2 pending rows in a run without limit, got 3; pass "
    "limit=… (--limit) to handle some of them first, or raise max_pending."
).removeprefix("careful.send: ")


def unsent() -> int:
    return Parcel.objects.filter(sent=False).count()


# --- the dry run


def test_it_says_in_one_line_what_a_run_would_do_and_does_nothing(manage: Manage) -> None:
    first, second = parcels("broken", "broken")
    with CaptureQueriesContext(connection) as queries:
        done = manage("run", "warehouse.deliver", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"warehouse.deliver: dry run: would try 2 of 2 pending rows, first {first}, {second}; "
        f"the flip takes row {first} out of pending\n"
    )
    assert not any(query["sql"].startswith("COMMIT") for query in queries)
    assert unsent() == 2
    assert manage("run", "warehouse.deliver", "--dry-run", "-v", "0").out == ""


def test_the_limit_is_that_of_the_run(manage: Manage) -> None:
    first, *_ = parcels("", "", "")
    done = manage("run", "warehouse.deliver", "--dry-run", "--limit", "1")
    assert f": dry run: would try 1 of 3 pending rows, first {first}; " in done.out


def test_with_all_each_processor_has_a_line(manage: Manage) -> None:
    parcels("")
    done = manage("run", "--all", "--dry-run")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "shop.send_shipped_emails: dry run: nothing pending" in lines
    assert any(line.startswith("warehouse.deliver: dry run: would try 1 of 1") for line in lines)


def test_json_is_one_document_for_each(manage: Manage) -> None:
    (row,) = parcels("")
    done = manage("run", "warehouse.deliver", "warehouse.fetch", "--dry-run", "--json")
    deliver, fetch = map(json.loads, done.out.splitlines())
    assert deliver == {
        "name": "warehouse.deliver",
        "dry_run": True,
        "pending": 1,
        "due": 1,
        "rows": 1,
        "capped": False,
        "limit": None,
        "first": [row],
        "rehearsed": row,
    }
    assert (fetch["name"], fetch["pending"], fetch["first"]) == ("warehouse.fetch", 0, [])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_using_chooses_the_database(manage: Manage) -> None:
    parcels("")
    with CaptureQueriesContext(connection) as queries:
        done = manage("run", "warehouse.deliver", "--dry-run", "--using", "other")
    assert (done.code, len(queries)) == (0, 0)


def test_what_a_run_would_refuse_it_reports_and_shows_the_others() -> None:
    parcels("")
    faulty = {"DJANGO_SETTINGS_MODULE": "tests.faulty.settings"}
    names = ("faulty.haunt", "faulty.run_in_circles", "warehouse.deliver")
    done = processors("run", *names, "--dry-run", **faulty)
    assert done.returncode == 1
    assert done.stdout.startswith("warehouse.deliver: dry run: would try 1 of 1 pending rows")
    haunt, circles, summary = done.stderr.splitlines()
    assert haunt.startswith("faulty.haunt: expected the table faulty_ghost, got none")
    assert circles.startswith("faulty.run_in_circles: expected done={'tries': 1} to take a row out")
    assert summary == (
        "CommandError: faulty.haunt and faulty.run_in_circles did not run to the end."
    )
    assert unsent() == 1


def test_it_is_for_a_single_run(manage: Manage) -> None:
    done = manage("run", "warehouse.deliver", "--dry-run", "--watch")
    assert (done.code, done.out) == (2, "")
    assert "expected --dry-run for a single run, got --watch as well" in done.err


# --- a backlog that is larger than expected


def test_a_run_that_refuses_says_how_many_wait_and_how_to_go_on(
    manage: Manage, install: Install
) -> None:
    install("careful", CAREFUL)
    parcels("", "", "")
    done = manage("run", "careful.send")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"careful.send: {REFUSED}",
        "CommandError: careful.send did not run to the end.",
    ]
    assert unsent() == 3
    dry = manage("run", "careful.send", "--dry-run", "--json")
    assert (dry.code, dry.err) == (1, done.err)
    assert json.loads(dry.out) == {"name": "careful.send", "ok": False, "error": REFUSED}
    assert manage("run", "careful.send", "--dry-run", "--limit", "2").code == 0
    assert manage("run", "careful.send", "--limit", "2").out.startswith("careful.send: 2 processed")
    assert manage("run", "careful.send").out.startswith("careful.send: 1 processed")


def careful(folder: Path) -> dict[str, str]:
    """Return the variables of a process that finds the processor's app, and so do its workers."""
    (folder / "careful").mkdir()
    (folder / "careful" / "__init__.py").touch()
    (folder / "careful" / "processors.py").write_text(HEAD + CAREFUL)
    settings = "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'careful']\n"
    (folder / "careful_settings.py").write_text(settings)
    return {
        "PYTHONPATH": f"{CHECKOUT}:{folder}",
        "DJANGO_SETTINGS_MODULE": "careful_settings",
    }


def test_with_several_workers_the_sentence_comes_once(tmp_path: Path) -> None:
    parcels("", "", "")
    done = processors("run", "careful.send", "--copies", "2", **careful(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"careful.send: {REFUSED}",
        "CommandError: careful.send did not run to the end.",
    ]
    assert unsent() == 3


def test_a_watch_reports_it_once_and_goes_on(tmp_path: Path) -> None:
    parcels("", "", "")
    looks = tmp_path / "looks"
    looks.touch()
    variables = careful(tmp_path)
    with watching("careful.send", "--watch", "0.1", **variables, LOOKS=str(looks)) as watcher:
        watcher.says(f"careful.send: {REFUSED}", err=True)
        asked = looks.stat().st_size
        until(lambda: looks.stat().st_size >= 3 * asked, "a third look")
        assert watcher.end() == (0, "", "")
    assert unsent() == 3
