"""The mixin for a project's own list of rows."""

from __future__ import annotations

import html
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages.storage.fallback import FallbackStorage
from django.core.checks import CheckMessage, messages, run_checks
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.test import Client, RequestFactory

from dcl_processor import Delivery, Lease, Retry, batch_processor
from dcl_processor.admin_page.mixin import ProcessorAdminMixin
from sample_app.shop.admin import PaymentAdmin
from sample_app.shop.models import Order, Payment
from tests.admin_page.conftest import MakePayments, make_user, post
from tests.admin_page.test_acting import button, confirmed, states
from tests.models import Parcel, QuietParcel, RoadTrain, Trailer, Truck, Vehicle

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/shop/payment/"
State = Payment.State


def asked_by(user: User | None, **query: str) -> Any:
    """Return a request, for views that are called without the middleware."""
    request: Any = RequestFactory().get("/", query)
    request.user, request.session = user, {}
    request._messages = FallbackStorage(request)
    return request


@pytest.mark.parametrize(("state", "number"), [("in_doubt", 2), ("given_up", 5), ("pending", 1)])
def test_a_list_is_filtered_by_state(
    operator: Client,
    doubtful: list[Payment],
    refused: list[Payment],
    payments: MakePayments,
    state: str,
    number: int,
) -> None:
    payments(1)
    page = operator.get(f"{LIST}?state_of_shop_capture_payments={state}").content.decode()
    assert f"{number} payment{'' if number == 1 else 's'}\n" in page


def test_the_actions_are_for_operators_who_may_change_the_rows(
    as_user: Callable[[str], Client], users: dict[str, User], refused: list[Payment]
) -> None:
    request = RequestFactory().get("/")
    for user, is_offered in (("operator", True), ("viewer", False), ("staff", False)):
        request.user = users[user]
        assert PaymentAdmin(Payment, admin.site).has_operate_permission(request) is is_offered
        page = as_user(user).get(LIST).content.decode()
        assert ("Put back: shop.capture_payments" in page) is is_offered
        keys = [each.pk for each in refused]
        response = post(as_user(user), LIST, action="dcl_requeue_0", _selected_action=keys)
        assert ("Put back 5 rows" in response.content.decode()) is is_offered
    assert states() == [State.REFUSED] * 5


def test_all_rows_of_a_filter_are_handed_over_to_the_page(
    operator: Client, refused: list[Payment]
) -> None:
    sent = {"action": "dcl_requeue_0", "_selected_action": [refused[0].pk], "select_across": "1"}
    asked = post(operator, f"{LIST}?state_of_shop_capture_payments=given_up", **sent)
    assert button(asked) == "Put back 5 rows"

    address = "/admin/dcl_admin/processor/shop.capture_5Fpayments/act/"
    done = post(operator, address, **confirmed(asked))

    assert done.status_code == 302
    assert states() == [State.DUE] * 5
    assert LogEntry.objects.count() == 5


# --- a list of another database


def listed_from_other(self: Any, request: HttpRequest) -> Any:
    return admin.ModelAdmin.get_queryset(self, request).using("other")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_a_list_of_another_database_is_refused_in_one_sentence(
    operator: Client, refused: list[Payment], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Its keys name other rows in the database of the processor."""
    monkeypatch.setattr(PaymentAdmin, "get_queryset", listed_from_other, raising=False)
    keys = [each.pk for each in refused]
    post(operator, LIST, action=f"dcl_{action}_0", _selected_action=keys)
    page = html.unescape(operator.get(LIST).content.decode())
    wanted = "expected a list of shop.Payment in the database 'default', whose rows the processor"
    assert f"{wanted} handles, got one of shop.Payment in the database 'other'" in page
    assert states() == [State.REFUSED] * 5


# --- a site without the page


@pytest.mark.urls("tests.admin_page.office")
def test_a_site_without_the_page_has_no_actions(operator: Client, refused: list[Payment]) -> None:
    for address in ("/office/shop/payment/", f"/office/shop/payment/{refused[0].pk}/change/"):
        page = operator.get(address)
        assert page.status_code == 200
        assert b"dcl_admin" not in page.content
        assert b"dcl_requeue_0" not in page.content
    sent = {"action": "dcl_requeue_0", "_selected_action": [refused[0].pk]}
    assert post(operator, "/office/shop/payment/", **sent).status_code == 200
    assert states() == [State.REFUSED] * 5


# --- a form, and what workers have written meanwhile


def test_a_form_does_not_write_back_what_a_worker_has_settled(
    operator: Client, payments: MakePayments
) -> None:
    """The browser sends what the page showed, and the row would be pending again."""
    (payment,) = payments(1)
    address = f"{LIST}{payment.pk}/change/"
    form = operator.get(address).context["adminform"].form
    shown = {name: value for name, value in form.initial.items() if value is not None}
    settled = {"state": State.CAPTURED, "charge_id": "ch_1"}
    Payment.objects.filter(pk=payment.pk).update(**settled)
    answer = post(operator, address, **{**shown, "state": State.DUE, "amount": "8.25"})
    assert answer.status_code == 302
    payment.refresh_from_db()
    assert (payment.state, str(payment.amount)) == (State.CAPTURED, "8.25")


SETTLED = {"state": State.REFUSED, "attempts": 4, "last_error": "NotCharged: no route"}


def test_a_worker_that_settles_the_row_while_its_form_is_saved_is_not_overwritten(
    operator: Client, payments: MakePayments, monkeypatch: pytest.MonkeyPatch
) -> None:
    (payment,) = payments(1)
    save = PaymentAdmin.save_model

    def settle_and_save(*arguments: Any) -> None:
        Payment.objects.filter(pk=payment.pk).update(**SETTLED)
        save(*arguments)

    monkeypatch.setattr(PaymentAdmin, "save_model", settle_and_save)
    sent = {"order": payment.order_id, "amount": "8.25"}
    assert post(operator, f"{LIST}{payment.pk}/change/", **sent).status_code == 302
    row = Payment.objects.values("amount", *SETTLED).get()
    assert row == {"amount": Decimal("8.25"), **SETTLED}


# --- a list of a proxy


@batch_processor(
    pending=lambda: QuietParcel.objects.filter(sent=False),
    done={"sent": True},
    failed={"note": "lost"},
    reset={"note": ""},
    claim={"note": "sending"},
    delivery=Delivery.AT_MOST_ONCE,
)
def deliver(parcel: Parcel) -> None:
    """Take rows of a proxy, which are those of its model."""


class Parcels(ProcessorAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    processors = (deliver,)


def test_an_action_in_the_list_of_a_proxy_needs_the_permission_on_the_model() -> None:
    made: Any = Parcels(QuietParcel, admin.site)
    codes = ("view_processors", "operate_processors", "change_quietparcel")
    request = asked_by(make_user("some", *codes))
    assert len(made.actions) == 3
    for act in made.actions:
        with pytest.raises(PermissionDenied):
            act(made, request, QuietParcel.objects.none())


# --- columns that workers write


@batch_processor(
    pending=lambda: Order.objects.filter(in_warehouse=False),
    done={"in_warehouse": True},
    claim={"freight": 1},
    reset={"freight": 0},
    failed={"ship_city": "lost", "customer_id": None},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(10),
    claimed_at="required_date",
    retry=Retry(),
)
def every(order: Order) -> None:
    """Has a column for each of its options."""


#: The columns of Order that it writes, in the order of its options.
WRITTEN = [
    *("in_warehouse", "ship_city", "customer", "freight"),
    *("required_date", "leased_until", "attempts", "next_attempt_at"),
]


def edited(*columns: str) -> list[CheckMessage]:
    """Return what is reported of a list with such columns, besides the reports of Django."""

    class List(ProcessorAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
        list_display = ("pk", "number", *columns)
        list_editable = columns
        processors = (every,)

    found = List(Order, admin.site).check()
    return [each for each in found if str(each.id).startswith("dcl_")]


def test_a_list_that_edits_what_a_processor_writes_is_a_warning() -> None:
    """The list of a user who saves it has an old value, and a worker has written another since."""
    assert edited("order_date", "shipped_at") == []
    [warning] = edited("order_date", *WRITTEN)
    assert (warning.id, warning.level) == ("dcl_processor.W008", messages.WARNING)
    assert f"columns that {every.name} writes, got {', '.join(WRITTEN)}: " in warning.msg
    assert str(warning.hint).startswith("Remove them; ")


def test_django_runs_the_check_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*filter(lambda each: each.id == "dcl_processor.W008", run_checks())] == []
    monkeypatch.setattr(admin.site._registry[Payment], "list_editable", ("state",))
    [warning] = filter(lambda each: each.id == "dcl_processor.W008", run_checks())
    assert (warning.obj, warning.hint is not None) == (PaymentAdmin, True)


# --- a list of another model


@batch_processor(
    pending=lambda: Vehicle.objects.filter(inspected=False),
    done={"inspected": True},
    reset={"inspected": False},
)
def inspect(vehicle: Vehicle) -> None:
    """Take rows of a parent."""


def vehicles(model: type[Vehicle]) -> Any:
    class Vehicles(ProcessorAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
        processors = (inspect,)

    return Vehicles(model, admin.site)


@pytest.mark.parametrize("model", [Vehicle, Truck, RoadTrain, Trailer])
def test_a_list_of_another_model_is_an_error(model: type[Vehicle]) -> None:
    """A child may have a key of its own, which names another row of its parent."""
    found = [each for each in vehicles(model).check() if str(each.id).startswith("dcl_")]
    assert [each.id for each in found] == ["dcl_processor.E019"] * (model is not Vehicle)
    for each in found:
        assert "expected a list of tests.Vehicle, " in each.msg
        assert f"got one of tests.{model.__name__}" in each.msg


def test_no_row_that_was_not_chosen_is_acted_on(operator: Client) -> None:
    Vehicle.objects.create()
    trailer = Trailer.objects.create(serial=Vehicle.objects.get().pk)
    made, request = vehicles(Trailer), asked_by(User.objects.create_superuser("chief"))
    made.has_change_permission = lambda *_: True
    for act in made.actions:
        act(made, request, Trailer.objects.filter(pk=trailer.pk))
    said = [str(each) for each in request._messages]
    assert len(said) == len(made.actions)
    assert all("expected a list of tests.Vehicle in the database" in each for each in said)
    assert not Vehicle.objects.filter(inspected=True).exists()
