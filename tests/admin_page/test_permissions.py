"""Seeing and operating are separate permissions, which the server checks at every address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from dcl_processor.admin_page.models import Processor
from dcl_processor.operator.actions import DID
from sample_app.shop.models import Payment
from tests.admin_page.conftest import grant, post
from tests.admin_page.test_acting import confirmed

pytestmark = pytest.mark.django_db

PREFIX = "dcl_admin_processor_"

#: Each address of the page by its name, and whether it writes. One that is not here fails a test.
ADDRESSES: dict[str, tuple[dict[str, str], bool]] = {
    "changelist": ({}, False),
    "change": ({"object_id": "shop.capture_5Fpayments"}, False),
    "act": ({"object_id": "shop.capture_5Fpayments"}, True),
}

USERS = ("anonymous", "customer", "staff", "only operates", "viewer", "reader", "operator")

#: What each user gets from an address that shows, from one that writes, and from a POST to that.
SHOWS = {"anonymous": 302, "customer": 302, "staff": 403, "only operates": 403}
OPERATES = {**SHOWS, "viewer": 403}
WRITES = {**OPERATES, "reader": 403}


def names() -> Iterator[str]:
    for pattern in admin.site._registry[Processor].get_urls():
        yield str(pattern.name).removeprefix(PREFIX)


def address(name: str) -> str:
    return reverse(f"admin:{PREFIX}{name}", kwargs=ADDRESSES[name][0])


def state() -> Any:
    return [*Payment.objects.order_by("pk").values()], LogEntry.objects.count()


def test_each_address_of_the_page_is_known_here() -> None:
    assert {*names()} == {*ADDRESSES}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_get_shows_to_those_who_may_see_and_writes_nothing(
    as_user: Callable[[str], Client], refused: list[Payment], name: str
) -> None:
    before = state()
    writes = ADDRESSES[name][1]
    for user in USERS:
        expected = (OPERATES if writes else SHOWS).get(user, 405 if writes else 200)
        response = as_user(user).get(address(name))
        assert (user, response.status_code) == (user, expected)
        assert b"NotCharged" not in response.content or expected == 200
    assert state() == before


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_post_without_a_token_does_nothing(
    as_user: Callable[[str], Client], refused: list[Payment], name: str
) -> None:
    before = state()
    sent = {"action": "requeue", "state": "given_up"}
    for user in USERS:
        response = as_user(user).post(address(name), sent)
        assert (user, response.status_code) == (user, 403)
        assert b"NotCharged" not in response.content
    assert state() == before


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_post_with_a_token_needs_the_permission(
    as_user: Callable[[str], Client], refused: list[Payment], name: str
) -> None:
    before = state()
    for user in USERS:
        expected = (WRITES if ADDRESSES[name][1] else SHOWS).get(user, 200)
        sent = {"action": "requeue", "state": "given_up"}
        response = post(as_user(user), address(name), **sent)
        assert (user, response.status_code) == (user, expected)
    # The first post only asks whether to go on.
    assert state() == before


@pytest.mark.parametrize("action", DID)
@pytest.mark.parametrize("user", USERS)
def test_each_action_needs_the_same_permissions_on_the_page_and_in_a_list(
    as_user: Callable[[str], Client], doubtful: list[Payment], user: str, action: str
) -> None:
    """The permission to operate processors, and the one to change rows of the model."""
    may = user == "operator"
    row = doubtful[0]
    sent = {"action": action, "state": "rows", "pk": str(row.pk)}
    asked = post(as_user(user), address("act"), **sent)
    assert (asked.status_code == 200) is may
    listed = post(
        as_user(user), "/admin/shop/payment/", action=f"dcl_{action}_0", _selected_action=[row.pk]
    )
    assert (b"dcl-confirm" in listed.content) is may

    if may:
        sent = confirmed(asked, values="state=captured\ncharge_id=ch_1")
        # What was confirmed is refused if the permission is taken away meanwhile.
        change = Permission.objects.get(codename="change_payment")
        User.objects.get(username=user).user_permissions.remove(change)
        before = state()
        assert post(as_user(user), address("act"), **sent).status_code == 403
        assert state() == before
        grant(user, "change_payment")
        assert post(as_user(user), address("act"), **sent).status_code == 302
        assert state() != before
