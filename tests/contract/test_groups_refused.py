"""Groups on a database that cannot lock a key for one transaction."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from dcl_processor.exceptions import Unsupported
from tests.contract.support.errands import ignore
from tests.contract.support.groups import grouped, rows_of
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Left out of a folder's tests by conftest.py; ``make quick`` names its files.
    pytest.mark.skipif(connection.vendor != "mysql", reason="keys are not refused there"),
]


def test_group_by_is_refused_before_any_row() -> None:
    rows_of(1)
    with pytest.raises(Unsupported, match="expected PostgreSQL or SQLite for group_by"):
        grouped("transactional", ignore)()
    assert not Errand.objects.filter(done=True).exists()


def test_the_lock_of_a_key_is_refused_as_well() -> None:
    with (
        transaction.atomic(),
        pytest.raises(Unsupported, match="PostgreSQL or SQLite for group_by"),
    ):
        grouped("transactional", ignore).lock_key(1)
