"""Each delivery and mode over rows in keys, while trouble is made for the rows of the hot key.

``ROWS=`` and ``WORKERS=`` make it longer (``make keys``): then over even keys, too.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import product

import pytest
from django.db import connection

from tests.contract.support.temporary import temporary
from tests.edge.manage import database_url
from tests.models import Errand
from tests.waiting import until

from . import audit, table
from .crew import Crew, crew_of
from .processors import DELIVERIES, MODES
from .troubles import KINDS, Troubles, renew_late

ROWS, WORKERS = int(os.environ.get("ROWS", "100")), int(os.environ.get("WORKERS", "3"))
#: The part of the rows that is in the hot key.
SKEWS = {"skewed": 0.9, **({"even": 0.0} if "ROWS" in os.environ else {})}
#: Rows for which trouble of each kind is made once.
ROWS_PER_TROUBLE = 100

pytestmark = [
    pytest.mark.skipif(connection.vendor != "postgresql", reason="its triggers are PostgreSQL's"),
    pytest.mark.django_db(transaction=True),
    *([pytest.mark.timeout(0)] if "ROWS" in os.environ else []),
]


def test_every_delivery_and_mode_keeps_to_the_keys_in_spite_of_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url())
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    made: Counter[str] = Counter()
    with temporary(table.MAKE, table.DROP), crew_of(WORKERS) as crew:
        for delivery, skew, mode in product(DELIVERIES, SKEWS, MODES):
            made += play(crew, delivery, skew, mode)
    assert {*made} == {each.__name__ for each in (renew_late, *KINDS)}


def play(crew: Crew, delivery: str, skew: str, mode: str) -> Counter[str]:
    """Let the workers handle rows while trouble is made, and judge the log."""
    waits = table.fill(ROWS, SKEWS[skew])
    troubles = Troubles(delivery, mode, waits, times=max(2, ROWS // ROWS_PER_TROUBLE))
    troubles.start()
    crew.begin(delivery, mode)
    try:
        wait_until_done()
    finally:
        troubles.end()
    wait_until_done()  # the rows that came at last
    failed = crew.end()
    lines = table.log()
    options, most = MODES[mode]
    verdict = audit.judge(
        lines, waits, most=most, in_order="in_order" in options, claims=delivery != "transactional"
    )
    begun = [line.at for line in lines if line.what == "begin"]
    seconds = max(line.at for line in lines if line.what == "done") - min(begun)
    which = f"{delivery}, {skew}, {mode}"
    print(
        f"\n{which}: {len(begun) / seconds:.0f} rows/s, {verdict.most} of a key in flight; "
        f"{dict(troubles.made)}"
    )
    expected = Counter(Errand.objects.values_list("pk", flat=True)) + troubles.again
    assert (which, failed, verdict.faults) == (which, 0, [])
    assert verdict.handled == expected, which
    return troubles.made


def wait_until_done() -> None:
    waiting = Errand.objects.filter(done=False)
    while left := waiting.count():
        until(lambda: waiting.count() != left, "a row to be handled", pause=0.1)
