"""All schedules, as far as the time allows, and a large sample: ``make explore``.

``EXPLORE=…`` runs the one schedule that a failure has printed, and draws it. ``SECONDS`` is what
each search may take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from .search import Priorities
from .stage import Count, Stage, staged
from .subjects import (
    ALL_KEYED,
    BEATING,
    CHOOSING,
    EDITED,
    KEYED,
    LAPSING,
    MORE,
    ONE_KEY,
    SUBJECTS,
    WAITING,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(0)]

WRITTEN = os.environ.get("EXPLORE", "")
SECONDS = float(os.environ.get("SECONDS") or 300)
EVERY = {**SUBJECTS, **MORE, **CHOOSING, **WAITING, **ALL_KEYED}
ALL = [] if WRITTEN else [*SUBJECTS, *MORE]
TWO_ROWS = [(name, 2) for name in ([] if WRITTEN else [*CHOOSING, *WAITING])]
#: Two keys, one of them with two rows; or one key with two.
TWO_ROWS += [(name, 2 if name in ONE_KEY else 3) for name in ([] if WRITTEN else ALL_KEYED)]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def shown(words: str) -> None:
        with capsys.disabled():
            print(f"\n{words}", end="", flush=True)

    return shown


LEASES = [each for each in SUBJECTS if each.startswith("lease")]
LAPSE, HEART = {"lapse": True}, {"hearts": 1}
ONE: dict[str, Any] = {"workers": 1}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, how) for how in (LAPSE, {**ONE, **HEART}) for name in LEASES),
    *((name, how) for how in (HEART, {**LAPSE, **HEART}) for name in LEASES),
    *((name, LAPSE) for name in LAPSING),
    *((name, {**ONE, **HEART, "beats": 2}) for name in BEATING),
    *((each.name, {**how, "edited": True}) for how in (ONE, {}) for each in EDITED),
    *((name, {"rows": 2, "edited": True}) for name in ONE_KEY),
    *(
        (name, {"rows": 2, **how})
        for how in (LAPSE, {**LAPSE, **HEART})
        for name in ONE_KEY
        if name.startswith("lease")
    ),
]


def whole(stage: Stage) -> Count:
    return stage.explore(seconds=SECONDS)


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, rows) for name in ALL for rows in (1, 2)), *TWO_ROWS]
)
def test_every_schedule_of_two_copies(name: str, rows: int, show: Callable[[str], None]) -> None:
    with staged(EVERY[name], rows=rows) as stage:
        show(f"2 workers, {rows} rows: {whole(stage)}")


@pytest.mark.parametrize(("name", "setting"), [] if WRITTEN else SETTINGS, ids=str)
def test_every_schedule_of_leases_and_edits(
    name: str, setting: dict[str, Any], show: Callable[[str], None]
) -> None:
    with staged(EVERY[name], **setting) as stage:
        show(f"{setting}: {whole(stage)}")


@pytest.mark.parametrize(("workers", "rows"), [(3, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("name", ALL)
def test_random_schedules(name: str, workers: int, rows: int, show: Callable[[str], None]) -> None:
    with staged(EVERY[name], workers=workers, rows=rows, every_statement=True) as stage:
        show(f"{workers} workers, {rows} rows, random: {stage.sample(10**9, seconds=SECONDS / 10)}")


@pytest.mark.parametrize("name", [] if WRITTEN else KEYED)
def test_random_schedules_of_keys(name: str, show: Callable[[str], None]) -> None:
    with staged(EVERY[name], workers=3, rows=5, every_statement=True) as stage:
        count = stage.sample(10**9, seconds=SECONDS / 10, by=Priorities)
        show(f"3 workers, 5 rows, random: {count}")


@pytest.mark.skipif(not WRITTEN, reason="EXPLORE names no schedule")
def test_the_schedule_that_was_written_down(show: Callable[[str], None]) -> None:
    name, size, *every, digits = WRITTEN.split(":")
    size, _, others = size.partition("+")
    workers, rows = map(int, size.split("x"))
    setting: dict[str, Any] = {"lapse": "t" in others, "edited": "e" in others}
    setting |= {"hearts": others.lower().count("h"), "beats": 1 + ("H" in others)}
    setting |= {"every_statement": bool(every)}
    with staged(EVERY[name], workers=workers, rows=rows, **setting) as stage:
        show(f"{name}\n\n{stage.replay(digits)}\n")
