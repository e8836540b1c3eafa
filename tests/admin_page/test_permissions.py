"""Seeing and operating are separate permissions, which the server checks at every address."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from dcl_processor import ledger
from dcl_processor.admin_page import acting
from dcl_processor.admin_page.models import Processor
from sample_app.shop.models import Payment
from tests.admin_page.conftest import NAME, grant, post
from tests.admin_page.test_acting import confirmed

pytestmark = pytest.mark.django_db

PREFIX = "dcl_admin_processor_"

#: Each address of the page by its name, and whether it writes. One that is not here fails a test.
ADDRESSES: dict[str, tuple[dict[str, str], bool]] = {
    "changelist": ({}, False),
    "change": ({"object_id": "shop.capture_5Fpayments"}, False),
    "row": ({"object_id": "shop.capture_5Fpayments", "key": "KEY"}, False),
    "act": ({"object_id": "shop.capture_5Fpayments"}, True),
    "control": ({"object_id": "shop.capture_5Fpayments"}, True),
    "control_all": ({}, True),
}

#: The addresses of orders, each with the page that has the buttons.
CONTROLS = [("control", "change"), ("control_all", "changelist")]

USERS = ("anonymous", "customer", "staff", "only operates", "viewer", "reader", "operator")

#: What each user gets from an address that shows, from one that operates a processor, and from one
#: that writes to rows.
SHOWS = {"anonymous": 302, "customer": 302, "staff": 403, "only operates": 403}
OPERATES = {**SHOWS, "viewer": 403}
WRITES = {**OPERATES, "reader": 403}


def names() -> Iterator[str]:
    for pattern in admin.site._registry[Processor].get_urls():
        yield str(pattern.name).removeprefix(PREFIX)


def address(name: str, row: Payment) -> str:
    arguments = {
        key: str(row.pk) if each == "KEY" else each for key, each in ADDRESSES[name][0].items()
    }
    return reverse(f"admin:{PREFIX}{name}", kwargs=arguments)


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
        response = as_user(user).get(address(name, refused[0]))
        assert (user, response.status_code) == (user, expected)
        assert b"NotCharged" not in response.content or expected == 200
    assert state() == before


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_post_without_a_token_does_nothing(
    as_user: Callable[[str], Client], refused: list[Payment], name: str
) -> None:
    before = state()
    sent = {"action": "requeue", "state": "given_up", "control": "pause"}
    for user in USERS:
        response = as_user(user).post(address(name, refused[0]), sent)
        assert (user, response.status_code) == (user, 403)
        assert b"NotCharged" not in response.content
    assert state() == before


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_post_with_a_token_needs_the_permission(
    as_user: Callable[[str], Client], refused: list[Payment], name: str
) -> None:
    before = state()
    allowed = 404 if name.startswith("control") else 200  # what was sent is no control
    for user in USERS:
        refused_ = WRITES if name == "act" else OPERATES if ADDRESSES[name][1] else SHOWS
        expected = refused_.get(user, allowed)
        sent = {"action": "requeue", "state": "given_up"}
        response = post(as_user(user), address(name, refused[0]), **sent)
        assert (user, response.status_code) == (user, expected)
    # The first post only asks whether to go on.
    assert state() == before


@pytest.mark.parametrize("action", acting.DID)
@pytest.mark.parametrize("user", USERS)
def test_each_action_needs_the_same_permissions_on_the_page_and_in_a_list(
    as_user: Callable[[str], Client], doubtful: list[Payment], user: str, action: str
) -> None:
    """The permission to operate processors, and the one to change rows of the model."""
    may = user == "operator"
    row = doubtful[0]
    sent = {"action": action, "state": "rows", "pk": str(row.pk)}
    asked = post(as_user(user), address("act", row), **sent)
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
        assert post(as_user(user), address("act", row), **sent).status_code == 403
        assert state() == before
        grant(user, "change_payment")
        assert post(as_user(user), address("act", row), **sent).status_code == 302
        assert state() != before


@pytest.mark.parametrize(("name", "page"), CONTROLS)
@pytest.mark.parametrize("user", USERS)
def test_a_processor_is_paused_by_those_who_may_operate_it(
    as_user: Callable[[str], Client], refused: list[Payment], user: str, name: str, page: str
) -> None:
    """A pause writes to no row of the model."""
    sent = {"control": "pause", "reason": "the gateway is down"}
    may = user not in OPERATES
    shown = as_user(user).get(address(page, refused[0])).content
    assert (b'value="pause"' in shown) is may
    post(as_user(user), address(name, refused[0]), **sent)
    assert LogEntry.objects.count() == may


@pytest.mark.parametrize(("name", "page"), CONTROLS)
def test_a_pause_that_changed_nothing_is_not_in_the_log(
    operator: Client, refused: list[Payment], name: str, page: str
) -> None:
    where = address(name, refused[0])
    said = []
    for sent in ("pause", "pause", "resume", "resume"):
        found = post(operator, where, control=sent, reason="closed", until="2h")
        assert found.headers["Location"] == address(page, refused[0])
        shown = operator.get(found.headers["Location"])
        said.append(str(next(iter(shown.context["messages"]))))
    entries = LogEntry.objects.order_by("pk")
    logged = [each.get_change_message() for each in entries]
    assert logged == ["Paused. closed 2h", "Resumed."]
    subject = NAME if name == "control" else "all processors"
    assert {each.object_repr for each in entries} == {subject}
    assert ["nothing to change" in each for each in said] == [False, True] * 2
    assert {each.partition(": ")[0] for each in said} == {subject}
    assert "Paused. closed" in operator.get(address("change", refused[0])).content.decode()


@pytest.mark.parametrize(("name", "page"), CONTROLS)
def test_a_pause_is_shown_with_its_end_and_is_part_of_what_is_announced(
    operator: Client, refused: list[Payment], name: str, page: str
) -> None:
    post(operator, address(name, refused[0]), control="pause", reason="<b>", until="2h")
    pause = ledger.state(NAME).pause
    assert pause is not None
    assert pause.until is not None
    assert round((pause.until - pause.since).total_seconds()) == 7200
    assert pause.of_all is (name == "control_all")
    for each in ("change", "changelist"):
        shown = operator.get(address(each, refused[0]))
        words = f"by operator in the admin, until {pause.until:%Y-%m-%d %H:%M:%S} UTC: &lt;b&gt;"
        assert words in shown.content.decode()
        summary = shown.context["summary"]
        assert f"{NAME}: given up 5" in summary
        assert ("all processors are paused" in summary) is pause.of_all
        assert "paused since" in summary
    assert (ledger.state("shop.expire_carts").pause is None) is not pause.of_all


@pytest.mark.parametrize("until", ["soon", "2020-01-31T06:00", "0"])
def test_a_pause_whose_end_is_no_time_to_come_is_refused_in_words(
    operator: Client, refused: list[Payment], until: str
) -> None:
    found = post(operator, address("control", refused[0]), control="pause", until=until)
    (said,) = operator.get(found.headers["Location"]).context["messages"]
    assert re.match(rf"{NAME}: expected a (time to come|duration such as 2h)", str(said))
    assert ledger.state(NAME).pause is None
    assert not LogEntry.objects.exists()
