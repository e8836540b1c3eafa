"""The handler's row is what the user's own queryset makes of it, in every claim of a run.

The first rows of a run are claimed in several statements, later ones in one where the database can:
each test handles enough rows to see both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import django
import pytest
from django.db import connection, models

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.contract.support import core
from tests.contract.support import errands as the
from tests.contract.support.marking import marking
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import execute
from tests.contract.support.wanted import corrupt, refuse_to_load
from tests.instances.models import Job, MailJob, PrintJob, Secret
from tests.kinds import models as kinds
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "transactional": {},
    "claim": {
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
        "claimed_at": "claimed_at",
    },
    "no claim": {"delivery": Delivery.AT_MOST_ONCE},
    "lease": {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60), "retry": Retry()},
}
each_delivery = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_size = pytest.mark.parametrize("size", [1, 2])


def processor(pending: Any, handled: list[Any], size: int, **options: Any) -> BatchProcessor[Any]:
    options = {"pending": pending, "done": {"done": True}, "batch_size": size, **options}
    return batch_processor(**options)(lambda row: handled.append(row))  # noqa: PLW0108  # no builtin


@each_delivery
@each_size
def test_rows_of_a_polymorphic_model_are_of_their_own_classes(options: Any, size: int) -> None:
    made = [
        PrintJob.objects.create(pages=place) if place % 2 else MailJob.objects.create(address="a")
        for place in range(6)
    ]
    handled: list[Any] = []
    jobs = Job.objects.filter(done=False, claimed=False)
    assert_run(processor(jobs, handled, size, **options)(), processed=6)
    assert [(type(row), row.pk) for row in handled] == [(type(row), row.pk) for row in made]
    assert [row.pages for row in handled if isinstance(row, PrintJob)] == [1, 3, 5]
    assert Job.objects.filter(done=True, leased_until=None, attempts=0).count() == 6


@each_delivery
@each_size
def test_a_field_that_is_read_by_a_function_is_read_by_it_for_each_row(
    options: Any, size: int
) -> None:
    for place in range(5):
        Secret.objects.create(word=f"word {place}")
    with connection.cursor() as cursor:
        cursor.execute("SELECT word FROM instances_secret ORDER BY id")
        assert [word for (word,) in cursor.fetchall()] == [f"WORD {place}" for place in range(5)]
    handled: list[Any] = []
    secrets = Secret.objects.filter(done=False, claimed=False)
    assert_run(processor(secrets, handled, size, **options)(), processed=5)
    assert [row.word for row in handled] == [f"word {place}" for place in range(5)]
    assert all(row.completed for row in handled)


if django.VERSION >= (6, 1):

    @each_delivery
    @each_size
    def test_the_querysets_own_fetch_mode_is_kept(options: Any, size: int) -> None:
        for _ in range(5):
            Secret.objects.create()
        handled: list[Any] = []
        secrets: Any = Secret.objects.filter(done=False, claimed=False)
        run = processor(secrets.fetch_mode(models.FETCH_RAISE), handled, size, **options)
        assert_run(run(), processed=5)
        assert {row._state.fetch_mode for row in handled} == {models.FETCH_RAISE}


@pytest.mark.parametrize("kind", [kinds.Plain, kinds.Hidden, kinds.Computed])
@core.each_delivery
@core.each_size
def test_i15_plain_instances_are_handled_once(
    kind: Any, delivery: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(core.NUMBER):
        kind(place=place).save()
    asked = {"is_over": False} if kind is kinds.Computed else {}
    rows = kind.objects.filter(**asked)
    core.Core(rows, delivery, size, core.STATES).check(caplog)


broken = partial(execute, "SELECT no_such_column FROM tests_errand")
cancelled = partial(execute, "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(9)")
FAULTS = [broken, corrupt, *([cancelled] if connection.vendor == "postgresql" else [])]
claiming = partial(the.at_most_once, reset={"claimed": False})


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [the.transactional, claiming, marking, the.at_least_once])
def test_i13_a_row_that_cannot_be_loaded_fails_alone_and_costs_no_attempt(
    make: the.Make, fault: Any, batch_size: int, monkeypatch: Any
) -> None:
    bad = the.errands(5)[1]
    retry = the.retry(max_attempts=2)
    run = make(the.ignore, retry=retry, failed={"dead": True}, batch_size=batch_size)
    refuse_to_load(bad, monkeypatch, fault)
    assert_run(run(), processed=4, failed=1)
    for _ in range(3):
        assert_run(run(), failed=1)
    monkeypatch.undo()
    assert the.untouched(bad)
    assert_run(run(), processed=1)


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
def test_i13_a_claim_that_is_refused_for_all_rows_calls_no_handler_and_costs_no_attempt(
    make: the.Make,
) -> None:
    """The read of the keys leaves the function out."""
    the.errands(3)
    asked = the.PENDING.annotate(told=models.Func("place", function="tests_no_such_function"))
    assert_run(make(the.raising(AssertionError()), pending=asked, retry=the.retry())(), failed=3)
    assert {*Errand.objects.values_list("attempts", "done")} == {(0, False)}
