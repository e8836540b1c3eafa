"""What the page shows, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dcl_processor.admin_page import views
from dcl_processor.operator import registry
from sample_app.shop.models import Cart, Order, Payment
from sample_app.shop.processors import expire_carts
from tests.admin_page.conftest import NAME, MakePayments

pytestmark = pytest.mark.django_db(transaction=True)

INDEX = "/admin/dcl_admin/processor/"
State = Payment.State


def detail(name: str) -> str:
    return f"{INDEX}{name.replace('_', '_5F')}/change/"


@pytest.fixture
def viewer(as_user: Callable[[str], Client]) -> Client:
    return as_user("viewer")


def test_seeing_the_pages_runs_nothing(
    as_user: Callable[[str], Client], payments: MakePayments
) -> None:
    """A template calls what can be called, and a processor can be."""
    (payment,) = payments(1)
    old = timezone.now() - timedelta(days=90)
    cart = Cart.objects.create(customer=payment.order.customer, pieces=1, touched_at=old)
    client = as_user("operator")
    name = expire_carts.name
    for address in (INDEX, detail(name), "/admin/shop/payment/", "/admin/shop/order/"):
        assert client.get(address).status_code == 200
    client.post(f"{INDEX}{name}/act/", {"action": "discard", "state": "rows", "pk": cart.pk})
    assert not Cart.objects.get().expired
    assert not Order.objects.get().shipped_email_sent


def cells(page: Any, name: str) -> dict[str, str]:
    """Return the cells of a processor's line, by the names of its answers."""
    (line,) = [line for line in page.context["lines"] if line["name"] == name]
    return {cell.name: cell.text or f"note {cell.note}" for cell in line["cells"]}


def test_the_page_has_a_line_for_each_processor_those_in_trouble_first(
    viewer: Client, doubtful: list[Payment], refused: list[Payment]
) -> None:
    answer = viewer.get(INDEX)
    page = answer.content.decode()
    names = [line["name"] for line in answer.context["lines"]]
    assert {*names} == {*registry.processors()}
    assert names[0] == NAME
    assert f"{NAME}: in doubt 2; {NAME}: given up 5" in page
    found = cells(answer, NAME)
    assert (found["in_doubt"], found["given_up"], found["pending"]) == ("2", "5", "0")
    states = [line["state"] for line in answer.context["lines"]]
    assert states[0] == "in doubt, given up"


def test_what_is_not_recorded_is_an_empty_cell_with_a_footnote(viewer: Client) -> None:
    answer = viewer.get(INDEX)
    name = "shop.send_shipped_emails"
    number = cells(answer, name)["in_progress"].removeprefix("note ")
    page = answer.content.decode()
    assert f'<a href="#note-{number}"' in page
    why = "Not recorded: a TRANSACTIONAL worker only locks its row"
    assert f'<li id="note-{number}">{why}</li>' in page
    assert page.count(why) == 1


def test_rows_are_grouped_by_their_errors_the_most_frequent_first(
    viewer: Client, refused: list[Payment]
) -> None:
    page = viewer.get(detail(NAME)).content.decode()
    assert "<h3>NotCharged: 3 rows</h3>" in page
    assert "<h3>Refused: 2 rows</h3>" in page
    assert page.index("NotCharged: 3") < page.index("Refused: 2")


def test_the_key_of_a_row_is_shown_as_it_is_typed(
    viewer: Client, payments: MakePayments, settings: Any
) -> None:
    settings.USE_THOUSAND_SEPARATOR = True
    (payment,) = payments(1, state=State.REFUSED, last_error="NotCharged: no route")
    Payment.objects.update(id=12345)
    assert payment.pk != 12345
    assert "Row 12345\n" in viewer.get(detail(NAME)).content.decode()


def test_an_error_is_masked_and_escaped(
    as_user: Callable[[str], Client], payments: MakePayments
) -> None:
    """Other programs than ``Retry`` write errors that do not begin with a class."""
    payments(1, state=State.REFUSED, last_error="password=hunter2 <b>" + "x" * 2_000)
    page = as_user("operator").get(detail(NAME)).content.decode()
    assert "hunter2" not in page
    assert "password=*** &lt;b&gt;xxx" in page
    assert "x" * 301 not in page


def test_a_database_that_is_down_is_said_and_asked_once(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import OperationalError

    from dcl_processor.insights import answer

    def refuse(*_: Any) -> None:
        raise OperationalError("postgres://shop:hunter2@db: connection refused")

    monkeypatch.setattr(answer, "is_connected", refuse)
    page = viewer.get(INDEX).content.decode()
    assert "Could not be found out" in page
    assert "hunter2" not in page


def test_questions_that_do_not_fit_into_the_time_are_not_asked(
    viewer: Client, refused: list[Payment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "PAGE", 0.0)
    page = viewer.get(INDEX).content.decode()
    assert "Not asked, because the time of the page was used up" in page
    assert "given up 5" not in page


def test_there_is_no_page_of_a_processor_that_is_not_known(viewer: Client) -> None:
    assert viewer.get(detail("shop.none")).status_code == 404
