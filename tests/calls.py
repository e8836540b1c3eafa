"""The way of one row through the package: how many calls, in how many files.

``python -m tests.calls`` prints it for each delivery; ``--each`` also prints each call of one.
A row in the middle of a run is followed, when everything that is made once has been made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import dcl_processor

PACKAGE = Path(dcl_processor.__file__).parent
ROWS, FOLLOWED = 15, 9


@dataclass
class Way:
    """The calls of one row in the order in which they began, each as (file, function)."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.calls})


def follow(run: Callable[[Callable[[Any], None]], Any]) -> Way:
    """Return the way of one row; ``run`` handles some rows with the handler that it is given.

    The way begins when the handler of the row before has returned, and ends when its own has.
    """
    way, handled = Way(), 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents or frame.f_code.co_name.startswith("<"):
            return  # not ours, or a comprehension: no name to go and read
        if event == "call":
            way.calls.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    def handle(_: Any) -> None:
        nonlocal handled
        handled += 1
        if handled == FOLLOWED:
            sys.setprofile(profile)
        elif handled == FOLLOWED + 1:
            sys.setprofile(None)

    try:
        run(handle)
    finally:
        sys.setprofile(None)
    return way


def ways() -> dict[str, Way]:
    """Follow a row of each delivery, in the database of the settings."""
    from dcl_processor import Delivery, Lease, batch_processor
    from tests.models import Errand

    pending = Errand.objects.filter(done=False)
    spanning = pending.filter(pk__in=pending.values("pk"))
    kinds: dict[str, dict[str, Any]] = {
        "transactional": {"pending": pending},
        "transactional, spanning": {"pending": spanning},
        "at most once": {"pending": pending, "delivery": Delivery.AT_MOST_ONCE},
        "at least once": {
            "pending": pending,
            "delivery": Delivery.AT_LEAST_ONCE,
            "lease": Lease(60),
        },
    }
    found: dict[str, Way] = {}
    for name, options in kinds.items():
        Errand.objects.all().delete()
        Errand.objects.bulk_create(Errand(place=place) for place in range(ROWS))
        make = batch_processor(done={"done": True}, **options)
        found[name] = follow(lambda handle, make=make: make(handle).run())  # type: ignore[misc]  # a default
    return found


def calls_of_a_batched_row(size: int) -> float:
    """Return the calls of Python functions for each row of a batch, those of others included."""
    few, more = (_calls_of_run(number * size, size) for number in (1, 3))
    return (more - few) / (2 * size)


def _calls_of_run(rows: int, size: int) -> int:
    from dcl_processor import batch_processor
    from tests.models import Errand

    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(place=place) for place in range(rows))
    make = batch_processor(
        pending=Errand.objects.filter(done=False), done={"done": True}, batch_size=size
    )
    run, calls = make(lambda row: None), 0

    def profile(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        report = run()
    finally:
        sys.setprofile(None)
    assert report.processed == rows
    return calls


def main() -> None:
    """Print the table, on a database of its own."""
    import os

    import django
    from django.test.utils import setup_databases, teardown_databases

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    before = setup_databases(0, interactive=False)
    try:
        found = ways()
    finally:
        teardown_databases(before, 0)
    print(f"{'':26}{'calls':>7}{'files':>7}")
    for name, way in found.items():
        print(f"{name:26}{len(way.calls):7}{way.files:7}")
    if "--each" in sys.argv:
        for name, way in found.items():
            print(f"\n{name}", *(f"  {file}: {call}" for file, call in way.calls), sep="\n")


if __name__ == "__main__":
    main()
