"""Primary keys of all kinds go through forms and addresses."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from django.test import Client

from dcl_processor import batch_processor, registry
from tests.admin_page.conftest import grant, post
from tests.models import Voucher

PAGE = "/admin/dcl_admin/processor/tests.redeem/"

KEYS = ["a b", " a", "a ", "a,b", "a/b", "a%20b", "a\nb", "a\rb", "a\\,b", '"<b>&', "_2C", "ü+"]


CLOSED = datetime(2026, 1, 1, tzinfo=UTC)


@batch_processor(
    name="tests.redeem",
    pending=lambda: Voucher.objects.filter(sent=False, leased_until=None),
    done={"sent": True},
    failed={"leased_until": CLOSED},
    reset={"leased_until": None},
)
def redeem(voucher: Voucher) -> None: ...


@pytest.mark.django_db(transaction=True)
def test_ticked_rows_with_any_key_are_put_back(
    as_user: Callable[[str], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "processors", lambda: {redeem.name: redeem})
    monkeypatch.setattr(registry, "broken", list)
    Voucher.objects.bulk_create(Voucher(code=key, leased_until=CLOSED) for key in ["", *KEYS])
    grant("operator", "change_voucher")
    client = as_user("operator")
    page = client.get(f"{PAGE}change/").content.decode()

    links = re.findall(r'href="([^"]*/row/[^"]*)"', page)
    found = {client.get(html.unescape(link)).context["key"] for link in links}
    assert found == {*KEYS}  # an address has no place for an empty key

    values = re.findall(r'name="pk" value="([^"]*)"', page)
    # As a browser sends a line break.
    sent = [re.sub(r"\r\n|\r|\n", "\r\n", html.unescape(each)) for each in values]
    asked = post(client, f"{PAGE}act/", action="requeue", state="rows", pk=sent)
    assert post(client, f"{PAGE}act/", plan=asked.context["signed"]).status_code == 302
    assert Voucher.objects.filter(leased_until=None).count() == len(KEYS) + 1
