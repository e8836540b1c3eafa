"""The audit finds what it is there to find."""

from __future__ import annotations

import pytest

from sample_app.shop.demo.mail_audit import Audit, Before, audit
from sample_app.shop.demo.mailbox import DeliveredMail
from sample_app.shop.loading import Loading
from sample_app.shop.models import Order
from tests.sample_app.conftest import WriteOrders, order_line

pytestmark = pytest.mark.django_db


def mail(number: int | None) -> DeliveredMail:
    return DeliveredMail(message_id="", recipient="", order_number=number)


@pytest.fixture
def before(write_orders: WriteOrders) -> Before:
    """Orders 1 to 3 have shipped, 4 has not, 5 has and its mail was sent long ago."""
    lines = [order_line(number) for number in (1, 2, 3, 5)]
    path = write_orders(*lines, order_line(4, shipped_date=""))
    Loading(lambda bad: pytest.fail(bad.reason)).load(path)
    Order.objects.filter(number=5).update(shipped_email_sent=True)
    return Before.look()


def flag_the_due_orders() -> None:
    Order.objects.filter(shipped_at__isnull=False).update(shipped_email_sent=True)


def test_one_mail_for_every_due_order_is_clean(before: Before) -> None:
    flag_the_due_orders()

    verdict = audit(before, map(mail, (1, 2, 3)))

    assert verdict == Audit(
        due=3,
        delivered=3,
        duplicates=0,
        twice=(),
        missing=(),
        not_due=(),
        still_due=(),
        unshipped=1,
        touched=(),
    )
    assert verdict.clean


def test_a_second_mail_is_a_duplicate(before: Before) -> None:
    flag_the_due_orders()

    verdict = audit(before, map(mail, (1, 2, 2, 2, 3)))

    assert (verdict.delivered, verdict.duplicates, verdict.missing) == (5, 2, ())
    assert verdict.twice == (2,)
    assert not verdict.clean


def test_a_flag_without_a_mail_is_missing(before: Before) -> None:
    flag_the_due_orders()

    verdict = audit(before, map(mail, (1, 3)))

    assert (verdict.duplicates, verdict.missing, verdict.still_due) == (0, (2,), ())
    assert not verdict.clean
