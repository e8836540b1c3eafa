"""A table of an unusual kind: in another schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import isolate_apps

from tests.contract.support import core
from tests.contract.support.temporary import temporary
from tests.kinds.models import Kind

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def elsewhere(transactional_db: None) -> Iterator[Any]:
    """Make a table in a schema of its own."""
    with isolate_apps("tests"):

        class Elsewhere(Kind):
            class Meta:
                app_label = "tests"
                db_table = 'second"."rows'

        with temporary("CREATE SCHEMA second", "DROP SCHEMA second CASCADE"):
            with connection.schema_editor() as editor:
                editor.create_model(Elsewhere)
            yield Elsewhere


@pytest.mark.parametrize("spans", [False, True], ids=["own-table", "spanning"])
@core.each_delivery
@core.each_size
def test_every_delivery_handles_each_row_once(
    elsewhere: Any, delivery: str, size: int, spans: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(core.NUMBER):
        elsewhere(place=place).save()
    rows = elsewhere.objects.all()
    asked = rows.filter(pk__in=rows.values("pk")) if spans else rows
    core.Core(asked, delivery, size, core.STATES).check(caplog)
