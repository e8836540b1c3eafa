"""The audit finds what it is there to find."""

from __future__ import annotations

import pytest

from sample_app.shop.demo.mail_audit import Before, audit
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


def test_a_second_mail_is_a_duplicate_and_a_flag_without_a_mail_is_missing(before: Before) -> None:
    Order.objects.filter(shipped_at__isnull=False).update(shipped_email_sent=True)

    verdict = audit(before, map(mail, (1, 2, 2, 2)))

    assert (verdict.due, verdict.delivered, verdict.duplicates) == (3, 4, 2)
    assert (verdict.twice, verdict.missing, verdict.still_due) == ((2,), (3,), ())
    assert not verdict.clean
