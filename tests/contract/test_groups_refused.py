"""A database without a lock of a key for one transaction: groups are refused there."""

from __future__ import annotations

import pytest
from django.db import transaction

from dcl_processor.checks import check_found
from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.registry import Found
from tests.contract.support.errands import ignore
from tests.contract.support.groups import MAKERS, grouped, rows_of
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

refused = pytest.raises(Unsupported, match="expected group_by on PostgreSQL or SQLite")


@pytest.mark.parametrize("delivery", MAKERS)
def test_group_by_is_refused_before_any_row(delivery: str) -> None:
    rows_of(1)
    with refused:
        grouped(delivery, ignore)()
    assert not Errand.objects.exclude(done=False, claimed=False, leased_until=None).exists()


def test_the_lock_of_a_key_is_refused_as_well() -> None:
    with transaction.atomic(), refused:
        grouped("transactional", ignore).lock_key(1)


def test_the_check_refuses_a_key() -> None:
    messages = check_found([Found(grouped("transactional", ignore), "tests.processors.keyed")])
    assert "dcl_processor.E015" in {each.id for each in messages}
