"""I10: signals to ``manage.py processors run``, with rows handled outside a transaction."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.support.reports import assert_run
from tests.crash import processors
from tests.crash.audit import effects
from tests.crash.processors import WAITS
from tests.crash.rows import FIRST, ROWS, SECOND, THIRD, fresh, rows, those
from tests.edge.manage import besides_lifecycle, started
from tests.gates import at_gate
from tests.models import Errand
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = "tests.crash.settings"
# Each claims two rows at once: the second is ours when the signal comes, and not started.
BATCHES = ["at_most_once_batch", "claim_batch", "lease_batch"]


@pytest.fixture
def gate(tmp_path: Path, audit: str) -> Path:
    """Return the folder where the first row's handler waits, after its effect."""
    fresh(*ROWS)
    Errand.objects.filter(pk=FIRST).update(place=WAITS)
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


def marks() -> set[int]:
    """Return the rows on which a claim, a lease or an attempt is to be seen."""
    return those(lambda row: row.claimed or row.claimed_at or row.leased_until or row.attempts)


@pytest.mark.parametrize("name", BATCHES)
def test_i10_the_row_at_hand_is_finished_and_the_others_are_free(gate: Path, name: str) -> None:
    command = ("run", f"crash.{name}", "--json")
    with started(*command, GATE=str(gate), DJANGO_SETTINGS_MODULE=SETTINGS) as process:
        at_gate(gate)
        process.send_signal(signal.SIGTERM)
        at_gate(gate, "stopping")
        (gate / "open").touch()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, besides_lifecycle(err)) == (0, "")
    report = json.loads(out)
    assert (report["processed"], report["stopped"]) == (1, "signal")
    assert those(lambda row: row.done) == {FIRST}
    assert effects() == Counter([FIRST])
    assert marks() <= {FIRST}
    assert rows()[FIRST].attempts == 0  # a success clears them

    assert_run(getattr(processors, name)(), processed=2)
    assert those(lambda row: row.done) == set(ROWS)
    assert effects() == Counter(ROWS)
    assert {row.attempts for row in rows().values()} == {0}


def test_i10_at_most_once_the_second_signal_leaves_the_claimed_rows_in_doubt(gate: Path) -> None:
    variables = {"GATE": str(gate), "DJANGO_SETTINGS_MODULE": SETTINGS}
    with started("run", "crash.claim_batch", **variables) as process:
        at_gate(gate)
        process.send_signal(signal.SIGTERM)
        at_gate(gate, "stopping")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, besides_lifecycle(err)) == (-signal.SIGTERM, "", "")
    assert effects() == Counter([FIRST])
    assert marks() == {FIRST, SECOND}
    doubts = processors.claim_batch.in_doubt(older_than=0)
    assert {row.pk for row in doubts} == {FIRST, SECOND}
    assert_run(processors.claim_batch(), processed=1)
    assert those(lambda row: row.done) == {THIRD}
    assert effects() == Counter([FIRST, THIRD])
