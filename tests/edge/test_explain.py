"""``manage.py processors explain``: what it prints, and with which exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.edge.manage import Install, Manage, execute
from tests.edge.watchers import parcels as made
from tests.edge.watchers import unsent
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DELIVER = "warehouse.deliver"


def parcels(number: int, **values: Any) -> None:
    Parcel.objects.bulk_create(Parcel(**values) for _ in range(number))
    analyze()


def analyze() -> None:
    execute("VACUUM ANALYZE tests_parcel")


def test_it_prints_what_a_person_wants_to_paste(manage: Manage) -> None:
    parcels(2_000, sent=True)
    done = manage("explain", DELIVER)
    assert (done.code, done.err) == (0, "")
    parts = [each.strip() for each in done.out.split("\n\n")]
    assert parts[0] == "warehouse.deliver: transactional, tests.Parcel on 'default'"
    assert parts[1] == (
        "The lock-free read:\n"
        '    SELECT "tests_parcel"."id" AS "pk" FROM "tests_parcel" WHERE NOT '
        '"tests_parcel"."sent" ORDER BY 1 ASC LIMIT 500'
    )
    assert parts[2].startswith("The plan of the lock-free read:\n    Limit  (cost=")
    assert parts[3] == (
        "Add to the Meta.indexes of tests.Parcel:\n    models.Index("
        "condition=models.Q(('sent', False)), fields=['id'], name='pending_deliver'),"
    )


# --- ``manage.py processors run --dry-run``, and what the command says of a refused backlog


CAREFUL = """
@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}, max_pending=2
)
def send(parcel): ...
"""
REFUSED = (
    "expected at most max_pending=2 pending rows in a run without limit, got more; pass limit=… "
    "(--limit) to handle some of them first, or raise max_pending."
)


def test_it_says_in_one_line_what_a_run_would_do_and_does_nothing(manage: Manage) -> None:
    first, second = made("broken", "broken")
    with CaptureQueriesContext(connection) as queries:
        done = manage("run", "warehouse.deliver", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"warehouse.deliver: dry run: would try 2 of 2 pending rows, first {first}, {second}; "
        f"the flip takes row {first} out of pending\n"
    )
    assert not any(query["sql"].startswith("COMMIT") for query in queries)
    assert len(unsent()) == 2


def test_json_is_one_document_for_each(manage: Manage) -> None:
    (row,) = made("")
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
        "refused": "",
    }
    assert (fetch["name"], fetch["pending"], fetch["first"]) == ("warehouse.fetch", 0, [])


def test_a_run_that_refuses_says_how_many_wait_and_how_to_go_on(
    manage: Manage, install: Install
) -> None:
    install("careful", CAREFUL)
    made("", "", "")
    done = manage("run", "careful.send")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"careful.send: {REFUSED}",
        "CommandError: careful.send did not run to the end.",
    ]
    assert len(unsent()) == 3
    dry = manage("run", "careful.send", "--dry-run", "--json")
    assert (dry.code, dry.err) == (1, done.err)
    refused = json.loads(dry.out)
    assert (refused["name"], refused["ok"], refused["error"]) == ("careful.send", False, REFUSED)
    assert manage("run", "careful.send", "--dry-run", "--limit", "2").code == 0
    assert manage("run", "careful.send", "--limit", "2").out.startswith("careful.send: 2 processed")
    assert manage("run", "careful.send").out.startswith("careful.send: 1 processed")
