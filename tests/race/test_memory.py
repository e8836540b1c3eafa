"""I8: a process that drains 200,000 rows is as small as one that drains 1,000."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.db import connection

from tests.models import Parcel

DRAIN = """
import resource, sys
import django
django.setup()
from django.db import connections
connections["default"].settings_dict["NAME"] = sys.argv[1]
from dcl_processor import batch_processor
from tests.models import Parcel

@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def send(row): ...

print(send().processed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def drain(number: int) -> int:
    """Drain so many rows in a process of its own, and return its peak in MB."""
    Parcel.objects.bulk_create((Parcel() for _ in range(number)), batch_size=10_000)
    name = str(connection.settings_dict["NAME"])
    command = [sys.executable, "-c", DRAIN, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    processed, megabytes = map(int, done.stdout.split())
    assert processed == number
    return megabytes


@pytest.mark.timeout(600)
@pytest.mark.django_db(transaction=True)
def test_i8_memory_stays_within_40_mb_of_what_it_is_with_a_thousand_rows() -> None:
    few = drain(1_000)
    assert drain(200_000) <= few + 40
