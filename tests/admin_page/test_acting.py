"""Actions on rows: what was confirmed is done, and nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.urls import reverse

from dcl_processor import batch_processor, ledger
from dcl_processor.admin_page import acting
from dcl_processor.operator import actions, registry
from dcl_processor.sql.session import Session
from sample_app.shop.models import Payment
from tests.admin_page.conftest import MakePayments, grant, post
from tests.models import Voucher

pytestmark = pytest.mark.django_db(transaction=True)

ACT = "/admin/dcl_admin/processor/shop.capture_5Fpayments/act/"
State = Payment.State


def confirmed(page: Any, **typed: Any) -> dict[str, Any]:
    """Return what the form of a confirmation sends, with what a person has typed."""
    form = page.content.decode().partition('class="dcl-confirm"')[2].partition("</form>")[0]
    sent: dict[str, Any] = {}
    for name, value in re.findall(r'type="hidden" name="([^"]*)" value="([^"]*)"', form):
        sent.setdefault(name, []).append(html.unescape(value))
    assert sent.pop("csrfmiddlewaretoken"), form
    return {**sent, **typed}


def button(page: Any) -> str:
    found = re.search(r'class="button default">([^<]*)<', page.content.decode())
    assert found is not None
    return html.unescape(found[1])


def states() -> list[str]:
    return [*Payment.objects.order_by("pk").values_list("state", flat=True)]


def test_rows_that_fail_after_the_confirmation_are_left(
    operator: Client, refused: list[Payment], payments: MakePayments
) -> None:
    asked = post(operator, ACT, action="requeue", state="given_up")
    late = payments(1, state=State.REFUSED, attempts=4, last_error="NotCharged: no route")
    Payment.objects.filter(pk=refused[0].pk).update(state=State.CAPTURED, charge_id="ch_1")

    done = post(operator, ACT, **confirmed(asked))

    assert states() == [State.CAPTURED] + [State.DUE] * 4 + [State.REFUSED]
    page = operator.get(done.headers["Location"]).content.decode()
    assert "4 rows put back into pending." in page
    assert "1 row left: changed since the choice." in page
    assert late[0].pk == Payment.objects.latest("pk").pk


def test_after_an_error_only_the_rows_that_were_not_tried_are_still_to_do(
    operator: Client, payments: MakePayments, monkeypatch: pytest.MonkeyPatch
) -> None:
    payments(5, state=State.REFUSED, last_error="NotCharged: no route")
    asked = post(operator, ACT, action="requeue", state="given_up")
    monkeypatch.setattr(actions, "WINDOW", 2)
    tries, change = list[Any](), Session.change

    def fail(*given: Any) -> Any:
        tries.append(given)
        if len(tries) == 2:
            raise RuntimeError("the disk is full")
        return change(*given)

    monkeypatch.setattr(Session, "change", fail)
    first = post(operator, ACT, **confirmed(asked))

    page = first.content.decode()
    assert "he disk is full" in page
    assert "2 rows put back into pending." in page
    assert button(first) == "Put back 3 rows"
    second = post(operator, ACT, **confirmed(first))
    assert states() == [State.DUE] * 5
    page = operator.get(second.headers["Location"]).content.decode()
    assert "3 rows put back into pending." in page
    assert "changed since the choice" not in page
    assert LogEntry.objects.count() == 5


def test_the_size_of_a_confirmation_is_bounded(
    operator: Client, payments: MakePayments, monkeypatch: pytest.MonkeyPatch
) -> None:
    payments(5, state=State.REFUSED, last_error="NotCharged: no route")
    assert acting.MOST + 100 < settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
    monkeypatch.setattr(acting, "MOST", 2)
    asked = post(operator, ACT, action="requeue", state="given_up")
    assert button(asked) == "Put back 2 rows"
    assert "There are more rows" in asked.content.decode()
    post(operator, ACT, **confirmed(asked))
    assert states().count(State.DUE) == 2


def test_each_row_has_an_entry_in_the_log(operator: Client, refused: list[Payment]) -> None:
    asked = post(operator, ACT, action="requeue", state="given_up", kind="Refused")
    post(operator, ACT, **confirmed(asked))

    entries = LogEntry.objects.order_by("pk")
    assert [each.object_id for each in entries] == [str(each.pk) for each in refused[3:]]
    assert {str(each) for each in entries.values_list("user__username", flat=True)} == {"operator"}
    assert [(each.action, each.by) for each in ledger.history()] == [
        ("requeue", "operator in the admin")
    ]
    history = operator.get(reverse("admin:shop_payment_history", args=[refused[3].pk]))
    assert "Put back (given up, Refused)." in history.content.decode()


def test_a_doubt_is_resolved_with_the_values_that_the_flip_needs(
    operator: Client, doubtful: list[Payment]
) -> None:
    sent = {"action": "mark_done", "state": "rows", "pk": str(doubtful[0].pk)}
    asked = post(operator, ACT, **sent)
    wrong = post(operator, ACT, **confirmed(asked, values="state=none of these"))
    assert "none of these" in wrong.content.decode()
    # A captured payment has a charge.
    refused = post(operator, ACT, **confirmed(asked, values=""))
    assert "The database reported:" in refused.content.decode()
    assert states() == [State.CAPTURING] * 2

    values = "state=captured\r\ncharge_id=ch_17"
    done = post(operator, ACT, **confirmed(asked, values=values))

    assert done.status_code == 302
    assert states() == [State.CAPTURED, State.CAPTURING]
    assert Payment.objects.get(pk=doubtful[0].pk).charge_id == "ch_17"


@pytest.mark.parametrize(
    "sent",
    [
        {"action": "delete", "state": "given_up"},
        {"action": "requeue", "state": "everything"},
        {"action": "requeue", "state": "rows", "pk": "no number"},
        {"action": "requeue", "state": "rows", "pk": "no number", "confirmed": "yes"},
    ],
)
def test_a_forged_form_does_nothing(
    operator: Client, refused: list[Payment], sent: dict[str, str]
) -> None:
    response = post(operator, ACT, **sent)
    assert response.status_code == 302
    assert states() == [State.REFUSED] * 5
    assert not LogEntry.objects.exists()
    page = operator.get(response.headers["Location"]).content.decode()
    assert "Expected" in page


def test_a_project_with_atomic_requests_gets_a_commit_for_each_chunk(
    operator: Client, refused: list[Payment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put back stays so, whatever becomes of the request."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    asked = post(operator, ACT, action="requeue", state="given_up")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the log is down")

    monkeypatch.setattr(acting, "_record", fail)
    with pytest.raises(RuntimeError, match="the log is down"):
        post(operator, ACT, **confirmed(asked))
    assert states() == [State.DUE] * 5


# --- primary keys of all kinds go through forms and addresses


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

    values = re.findall(r'name="pk" value="([^"]*)"', page)
    # As a browser sends a line break.
    sent = [re.sub(r"\r\n|\r|\n", "\r\n", html.unescape(each)) for each in values]
    asked = post(client, f"{PAGE}act/", action="requeue", state="rows", pk=sent)
    assert post(client, f"{PAGE}act/", **confirmed(asked)).status_code == 302
    assert Voucher.objects.filter(leased_until=None).count() == len(KEYS) + 1
