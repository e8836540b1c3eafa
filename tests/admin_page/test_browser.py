"""A person with a browser: watches, pauses, puts rows back, resolves doubts; screenshots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from playwright.sync_api import Page, expect
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from dcl_processor import ledger
from dcl_processor.admin_page import views
from sample_app.shop.models import Order, Payment
from tests import waiting
from tests.admin_page.browser import PATIENCE, Browser
from tests.admin_page.conftest import NAME, MakePayments
from tests.admin_page.policy import POLICY
from tests.servers.chromium import CHROMIUM, is_installed

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not is_installed(), reason=f"{CHROMIUM} is not installed"),
]

PASSWORD = "a password of the tests"  # noqa: S105
INDEX = "/admin/dcl_admin/processor/"
DETAIL = f"{INDEX}shop.capture_5Fpayments/change/"
EMAILS = "shop.send_shipped_emails"
State = Payment.State

#: Where the pictures go that the documentation has, if the variable names its folder.
PICTURES = os.environ.get("SCREENSHOTS")
IN_THE_DOCUMENTATION = {"index", "detail-light", "confirm-light"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_complaints(browser: Browser) -> Iterator[None]:
    """Fail the test if a page broke the policy, or a script failed."""
    browser.complaints.clear()
    yield
    assert browser.complaints == []


@pytest.fixture(autouse=True)
def _patient_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a page as long as it needs: a picture is to show numbers, on a busy machine as well."""
    if PICTURES:
        monkeypatch.setattr(views, "QUESTION", PATIENCE / 1000)
        monkeypatch.setattr(views, "PAGE", PATIENCE / 1000)


@pytest.fixture
def log_in(
    browser: Browser, live_server: LiveServer, users: dict[str, User | None], settings: Settings
) -> Iterator[Callable[..., Page]]:
    # Fast, for a password that keeps nothing secret.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

    def log_in(name: str, **options: Any) -> Page:
        user = users[name]
        assert user is not None
        user.set_password(PASSWORD)
        user.save()
        page = browser.open(base_url=live_server.url, **options)
        opened.append(page)
        browser.do(_log_in, page, name)
        return page

    opened: list[Page] = []
    yield log_in
    for page in opened:
        # Or it would go on asking while the tables are emptied, and complain in the next test.
        browser.do(page.context.close)


def _log_in(page: Page, name: str) -> None:
    answer = page.goto(INDEX)
    assert answer is not None
    assert answer.headers["content-security-policy"] == POLICY
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Processors", exact=True)).to_be_visible()


def picture(page: Page, name: str, tmp_path: Path) -> Path:
    folder = Path(PICTURES) if PICTURES and name in IN_THE_DOCUMENTATION else tmp_path
    path = folder / f"admin-{name}.png"
    page.screenshot(path=path)
    return path


def cell(page: Page, processor: str, name: str) -> str:
    """Return a cell of a processor's line."""
    line = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=processor))
    return line.locator(f"[data-name={name}]").inner_text().strip()


def until(browser: Browser, page: Page, condition: Callable[[], bool]) -> None:
    """Wait for something on a page."""
    waiting.until(lambda: browser.do(condition), f"a change of {page.url}", pause=0.1)


def test_a_person_watches_the_numbers_change(
    browser: Browser,
    log_in: Callable[..., Page],
    payments: MakePayments,
    doubtful: list[Payment],
    tmp_path: Path,
) -> None:
    payments(18)
    page = log_in("viewer")
    assert browser.do(cell, page, EMAILS, "pending") == "20"
    keys = [*Order.objects.order_by("pk").values_list("pk", flat=True)]
    Order.objects.filter(pk__in=keys[:12]).update(shipped_email_sent=True)
    until(browser, page, lambda: cell(page, EMAILS, "pending") == "8")
    assert browser.violations(page) == []
    assert browser.do(picture, page, "index", tmp_path).stat().st_size > 10_000


#: Counts the questions of a page, and ticks a box while the answer to the second one comes.
COUNT = """
const real = fetch;
window.asked = 0;
window.fetch = async (...all) => {
  const answer = real(...all);
  if (++asked === 2) document.querySelector("[type=checkbox][name=pk]").click();
  return answer;
};
"""
HIDE = """is => {
  Object.defineProperty(document, "hidden", { value: is, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_updates_wait_for_the_person_and_what_has_changed_is_announced(
    browser: Browser, log_in: Callable[..., Page], refused: list[Payment]
) -> None:
    page = log_in("operator")
    box, said = page.get_by_label(f"Row {refused[0].pk}"), page.locator("#dcl-announce")
    pause = page.get_by_role("button", name="Pause updates")

    def asks_nothing() -> None:
        """Let a minute pass by the page's clock."""
        page.clock.run_for(60_000)
        assert page.evaluate("asked") == 0
        assert said.inner_text() == ""

    def wait() -> None:
        page.clock.install()
        page.clock.pause_at("2100-01-01")
        page.add_init_script(COUNT)
        page.goto(DETAIL)
        box.check()
        asks_nothing()
        assert box.is_checked()
        box.uncheck()
        page.evaluate(HIDE, True)
        asks_nothing()
        page.evaluate(HIDE, False)
        pause.click()
        asks_nothing()
        pause.click()

    browser.do(wait)
    refused[4].delete()

    def shown() -> None:
        page.clock.run_for(5_000)
        page.clock.resume()
        expect(said).to_have_text(f"{NAME}: given up 4")

    browser.do(shown)
    refused[3].delete()

    until(browser, page, lambda: page.evaluate("asked") == 2)

    def ticked_meanwhile() -> None:
        assert page.locator("[name=pk]:checked").count() == 1
        expect(said).to_have_text(f"{NAME}: given up 4")

    browser.do(ticked_meanwhile)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_operator_puts_failed_rows_back_by_keyboard(
    browser: Browser,
    log_in: Callable[..., Page],
    refused: list[Payment],
    doubtful: list[Payment],
    tmp_path: Path,
    scheme: str,
) -> None:
    page = log_in("operator", color_scheme=scheme)
    browser.do(page.goto, DETAIL)
    assert browser.violations(page) == []
    assert browser.do(picture, page, f"detail-{scheme}", tmp_path).stat().st_size > 10_000

    def ask() -> None:
        button = page.get_by_role("button", name="Put back… ticked rows, or all: given up, NotCh")
        button.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Put back 3 rows")).to_be_visible()

    browser.do(ask)
    assert browser.violations(page) == []
    assert browser.do(picture, page, f"confirm-{scheme}", tmp_path).stat().st_size > 5_000
    assert Payment.objects.filter(state=State.REFUSED).count() == 5

    def confirm() -> None:
        page.get_by_role("button", name="Put back 3 rows").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_text("3 rows put back into pending.")).to_be_visible()

    browser.do(confirm)
    assert Payment.objects.filter(state=State.DUE).count() == 3
    assert Payment.objects.filter(state=State.REFUSED).count() == 2


def test_a_pause_is_shown(
    browser: Browser, log_in: Callable[..., Page], refused: list[Payment]
) -> None:
    ledger.pause(NAME, reason="no route")
    page = log_in("viewer")
    assert browser.violations(page) == []

    def look() -> None:
        page.goto(DETAIL)
        expect(page.locator("#dcl-now-title")).to_contain_text("paused")
        expect(page.locator("#dcl-summary")).to_contain_text("no route")

    browser.do(look)


def test_the_page_works_without_a_script(
    browser: Browser, log_in: Callable[..., Page], refused: list[Payment]
) -> None:
    page = log_in("operator", java_script_enabled=False)
    assert browser.do(cell, page, EMAILS, "pending") == "5"
    Order.objects.filter(number__lte=2).update(shipped_email_sent=True)

    def act() -> None:
        page.get_by_role("link", name="Refresh").click()
        page.wait_for_load_state()
        assert cell(page, EMAILS, "pending") == "3"
        page.goto(DETAIL)
        page.get_by_role("button", name="Put back… ticked rows, or all: given up, Refused").click()
        page.get_by_role("button", name="Put back 2 rows").click()
        expect(page.get_by_text("2 rows put back into pending.")).to_be_visible()

    browser.do(act)
    assert Payment.objects.filter(state=State.DUE).count() == 2


def test_a_person_who_was_signed_out_gets_no_login_page_into_the_table(
    browser: Browser, log_in: Callable[..., Page], payments: MakePayments
) -> None:
    payments(3)
    page = log_in("viewer")
    Session.objects.all().delete()

    def ended() -> None:
        expect(page.locator("#dcl-announce")).to_have_text("Signed out: updates have ended.")
        assert page.get_by_label("Password").count() == 0
        assert cell(page, EMAILS, "pending") == "3"

    browser.do(ended)
