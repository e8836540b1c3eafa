"""I8: a process that works on 200,000 pending rows is as small as one that works on 1,000."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.db import connection

from tests.models import Parcel
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
