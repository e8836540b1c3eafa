"""A handler that forks: its child takes no part in the run, and a signal ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge.manage import processors
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.hanging.settings", "PYTHONWARNINGS": "default"}
CHILDREN = ["forks a child that exits", "forks a child that raises", "forks a child that returns"]


def run(audit: Path, name: str, *arguments: str) -> None:
    """Run a processor of three rows; expect each to be handled once, in one process."""
    done = processors("run", f"hanging.{name}", *arguments, **SETTINGS)
    assert done.returncode == 0, done.stderr
    assert f"hanging.{name}: 3 processed" in done.stdout
    handled = [line.split() for line in audit.read_text().splitlines()]
    rows = {each.pk for model in (Parcel, Errand) for each in model.objects.all()}
    assert sorted(int(pk) for pk, _ in handled) == sorted(rows)
    assert len({pid for _, pid in handled}) == 1


@pytest.mark.parametrize("how", CHILDREN)
@pytest.mark.parametrize("name", ["deliver", "deliver_slowly", "fetch", "bring", "fetch_async"])
def test_its_child_ends_with_the_handler_and_the_rows_work_stays(
    audit: Path, name: str, how: str
) -> None:
    notes = ("", how, "")
    if name.startswith("deliver"):
        Parcel.objects.bulk_create([Parcel(note=note) for note in notes])
    else:
        Errand.objects.bulk_create([Errand(result=note) for note in notes])
    run(audit, name)
    settled = Errand.objects.filter(done=True, attempts=0, leased_until=None)
    assert Parcel.objects.filter(sent=True).count() + settled.count() == 3


@pytest.mark.parametrize("name", ["deliver", "deliver_slowly"])
def test_the_processes_of_its_pool_are_ended_by_a_signal(audit: Path, name: str) -> None:
    """They have not kept the handlers by which the command waits for the row at hand."""
    Parcel.objects.bulk_create([Parcel(note=note) for note in ("", "uses a pool", "")])
    run(audit, name)
    assert not Parcel.objects.filter(sent=False).exists()
