"""I8: a process that works on 200,000 pending rows is as small as one that works on 1,000."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from tests.models import Entry, Errand, Parcel
from tests.race.workers import Copies, workers
from tests.waiting import PATIENCE

DRAIN = """
import sys
import django
django.setup()
from django.db import connections
connections["default"].settings_dict["NAME"] = sys.argv[1]
from dcl_processor import batch_processor
from tests.models import Parcel

@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False),
    done={"sent": True},
    batch_size=500,
    max_pending=None,
)
def send(row): ...

report = send()
# Not getrusage(): its figure starts at what the parent had, and is kept across exec().
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert report.stopped == "drained"
print(report.processed, int(status["VmHWM"].split()[0]) // 1024)
"""


def drain(pending: int) -> int:
    """Handle all of so many pending rows in a process of its own; return its peak in MB."""
    for _ in range(pending // 1_000):
        Parcel.objects.bulk_create([Parcel() for _ in range(1_000)])
    name = str(connection.settings_dict["NAME"])
    command = [sys.executable, "-c", DRAIN, name]
    patience = 4 * PATIENCE  # it drains 200,000 rows
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=patience)
    processed, megabytes = map(int, done.stdout.split())
    assert processed == pending
    assert not Parcel.objects.filter(sent=False).exists()
    return megabytes


@pytest.mark.django_db(transaction=True)
def test_i8_memory_stays_within_40_mb_of_what_it_is_with_a_thousand_rows() -> None:
    few = drain(1_000)
    assert drain(200_000) <= few + 40


# --- copies that take the updates of each chat in their order: none passes another, none is lost


WORKERS, ROWS, CHATS = 3, 600, 40


@pytest.fixture(scope="module")
def team(django_db_setup: None) -> Iterator[Copies]:
    with workers(WORKERS) as team:
        yield team


def updates(*, hot: float) -> list[Errand]:
    """Make updates of chats in a random order; the part ``hot`` of them is in one chat."""
    rng = random.Random(11)  # noqa: S311  # no secret
    places = [0 if rng.random() < hot else rng.randrange(CHATS) for _ in range(ROWS)]
    Errand.objects.bulk_create([Errand(place=place) for place in places])
    return list(Errand.objects.order_by("pk"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("hot", [0.0, 0.9])
@pytest.mark.parametrize("name", ["transactional", "at_most_once", "at_least_once"])
def test_the_updates_of_each_chat_are_handled_in_their_order(
    team: Copies, name: str, hot: float
) -> None:
    rows = updates(hot=hot)
    handled = team.race(f"chat_{name}")
    assert sorted(pk for each in handled for pk in each) == [row.pk for row in rows]
    assert not Errand.objects.filter(done=False).exists()
    expected: dict[int, list[Any]] = defaultdict(list)
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        expected[row.place] += [(row.pk, True), (row.pk, False)]
    for place, *entry in Entry.objects.order_by("pk").values_list("place", "errand", "begins"):
        found[place].append(tuple(entry))
    assert found == expected
