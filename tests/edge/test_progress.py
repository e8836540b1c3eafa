"""The bar of a run on a terminal: what it counts, and what it asks."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from pytest_django import DjangoAssertNumQueries

from dcl_processor import batch_processor
from dcl_processor.management.progress import bar
from dcl_processor.report.observer import observers_installed
from tests.models import Depot

pytestmark = pytest.mark.django_db(transaction=True)

WHERE: dict[str, Any] = {"using": None, "limit": None}


def test_the_bar_counts_the_rows_of_its_processor_and_those_that_failed() -> None:
    def fail(depot: Depot) -> None:
        if depot.name:
            raise OSError(depot.name)

    close = batch_processor(pending=Depot.objects.filter(open=True), done={"open": False})(fail)
    other = batch_processor(
        pending=Depot.objects.filter(open=False, name="done"), done={"name": "over"}
    )(lambda row: None)
    Depot.objects.bulk_create([Depot(open=True), Depot(open=True, name="x")])
    Depot.objects.bulk_create(Depot(open=False, name="done") for _ in range(3))
    before = [*observers_installed]
    with bar(close, **WHERE):
        (shown,) = [made for each in observers_installed[len(before) :] if (made := each(close))]
        close()
        other()
        (task,) = shown.drawing.tasks
    assert (task.completed, task.total, task.fields["failed"]) == (2, 2, 1)
    assert observers_installed == before


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_spectator_nothing_is_asked(
    installed: None, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    out, err = Terminal(), Terminal()
    with django_assert_num_queries(1):
        call_command("processors", "run", "warehouse.deliver", verbosity=0, stdout=out, stderr=err)
    with django_assert_num_queries(1):  # stderr is a file
        call_command("processors", "run", "warehouse.deliver", stdout=out, stderr=StringIO())
    assert err.getvalue() == ""
