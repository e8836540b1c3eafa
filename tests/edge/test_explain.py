"""``manage.py processors explain``: what it prints, and with which exit code."""

from __future__ import annotations

import json

import pytest

from tests.contract.support.temporary import execute
from tests.edge.manage import Manage
from tests.edge.watchers import parcels as made
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DELIVER = "warehouse.deliver"


def test_it_prints_what_a_person_wants_to_paste(manage: Manage) -> None:
    Parcel.objects.bulk_create(Parcel(sent=True) for _ in range(2_000))
    execute("VACUUM ANALYZE tests_parcel")
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
