"""Rows that get another primary key."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models

from dcl_processor import batch_processor
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize("make", [the.at_most_once, the.at_least_once, None])
@pytest.mark.parametrize("size", [1, 3])
def test_a_row_that_its_handler_moves_to_another_key_has_failed(make: Any, size: int) -> None:
    """It would be processed under the one key, and pending under the other."""
    pks = [row.pk for row in the.errands(3)]

    def move(row: Errand) -> None:
        if row.place == 1:
            Errand.objects.filter(pk=row.pk).delete()
            row.pk = Errand.objects.create(pk=row.pk + 1000, place=row.place).pk

    if make is None:
        run: Any = batch_processor(pending=the.PENDING, done={"done": True}, batch_size=size)(move)
    else:
        run = make(move, batch_size=size)
    report = run(filter=models.Q(pk__in=pks))
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert f"got row {pks[1]} with the key {pks[1] + 1000}" in str(failure.error)
    # The default delivery takes the row's work back.
    assert Errand.objects.filter(pk=pks[1]).exists() is (make is None)
