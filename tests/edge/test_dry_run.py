"""``manage.py processors run --dry-run``, and what the command says of a refused backlog."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.edge.manage import Install, Manage
from tests.edge.watchers import parcels, unsent

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
    assert len(unsent()) == 2
    assert manage("run", "warehouse.deliver", "--dry-run", "-v", "0").out == ""


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
    assert len(unsent()) == 3
    dry = manage("run", "careful.send", "--dry-run", "--json")
    assert (dry.code, dry.err) == (1, done.err)
    assert json.loads(dry.out) == {"name": "careful.send", "ok": False, "error": REFUSED}
    assert manage("run", "careful.send", "--dry-run", "--limit", "2").code == 0
    assert manage("run", "careful.send", "--limit", "2").out.startswith("careful.send: 2 processed")
    assert manage("run", "careful.send").out.startswith("careful.send: 1 processed")
