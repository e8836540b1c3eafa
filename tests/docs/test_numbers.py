"""Numbers that pages have in their sentences are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcl_processor import alive, backlog, report
from dcl_processor.candidates import scan
from dcl_processor.contrib.reservations import reservation
from dcl_processor.definition import retry
from dcl_processor.engine import source
from dcl_processor.execution import calls
from dcl_processor.ledger import desk, records, tables
from dcl_processor.processes import monitor, supervisor
from dcl_processor.runner import counters, holds
from dcl_processor.watch import polling
from tests.environments import ENVIRONMENTS

CHECKOUT = Path(__file__).resolve().parents[2]
WORD: dict[float, str] = {3: "three", 10: "ten", 60: "a minute"}

SENTENCES = {
    "README.md": [
        f"Python {ENVIRONMENTS[0].python} to {ENVIRONMENTS[-1].python}; "
        "Django {}, {} and {}.".format(*(each.django for each in ENVIRONMENTS))
    ],
    "docs/howto/run.md": [
        f"the wait grows to {WORD[polling.MOST_INTERVALS]} intervals",
        f"kills it {WORD[calls.GRACE]} seconds after the limit",
        f"moved in the last {WORD[monitor.SILENT]} seconds",
        f"named by a warning after {monitor.FIRST_WARNING / 60:g}, ",
        f"--max-age {alive.MAX_AGE:g}",
        f"after further deaths within {WORD[supervisor.LIVED_LONG]} with a backoff",
    ],
    "docs/howto/failures.md": [
        f"ends after {counters.MOST_FROM_THE_START} failures",
        f"up to {counters.MOST_FAILURES} in a run",
    ],
    "docs/howto/define.md": [f"within windows of {scan.WINDOW} rows"],
    "docs/howto/operate.md": [
        f"A run waits up to {holds.LONGEST:g} seconds",
        f"`True` for {holds.PAUSE:g} seconds",
        f"Orders wait {tables.LOCK_WAIT:g} seconds for a lock",
        f"deleted after {records.KEEP.days} days",
        f"`lost` after {WORD[records.LOST_AFTER]} without a heartbeat",
        f"after {desk.PATIENCE:g} seconds once",
        f"counted up to {backlog.MOST:,}",
    ],
    "docs/explanation/promises.md": [f"at most {source.MOST_LOCKED:,}, for `wait_for_locked`"],
    "docs/reference/processors.md": [
        f"of which {retry.LONGEST_ERROR:,} characters are used",
        f"up to {reservation.MOST:,} rows, a `Reservation` each",
    ],
    "docs/reference/results.md": [f"counted up to {report.MOST_COUNTED:,}"],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text = " ".join((CHECKOUT / page).read_text(encoding="utf-8").split())
    assert [each for each in SENTENCES[page] if each not in text] == []
