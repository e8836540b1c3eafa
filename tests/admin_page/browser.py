"""A real browser, in a thread of its own: Playwright's event loop would keep the ORM from working.

The pages' own console is part of what is tested: a violation of the policy, or an error of a
script, fails the test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from playwright.sync_api import BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.servers.chromium import CHROMIUM

T = TypeVar("T")

#: Milliseconds, for a machine that has other things to do.
PATIENCE = 60_000

#: WCAG 2.2 AA, and what it includes.
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


class Browser:
    """Does things on pages in its own thread; ``complaints``: what the console has said."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser")
        self.complaints: list[str] = []
        self.do(self._start)

    def do(self, act: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the browser's thread, and return its result."""
        return self._thread.submit(act, *arguments).result(timeout=5 * PATIENCE / 1000)

    def close(self) -> None:
        self.do(self._end)
        self._thread.shutdown()

    def open(self, **options: Any) -> Page:
        """Open a page in a context of its own, as another person has it."""
        return self.do(self._open, options)

    def violations(self, page: Page) -> list[str]:
        """Return what axe finds on a page, with the elements."""
        return self.do(_violations, page)

    def _start(self) -> None:
        self._playwright = sync_playwright().start()
        expect.set_options(timeout=PATIENCE)
        # The sandbox does not work for root, who runs the tests in a container.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._browser = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=PATIENCE
        )

    def _end(self) -> None:
        self._browser.close()
        self._playwright.stop()

    def _open(self, options: dict[str, Any]) -> Page:
        context: BrowserContext = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"an error: {error}"))
        return page

    def _hear(self, message: ConsoleMessage) -> None:
        # The server of the tests has no icon.
        is_icon = message.location.get("url", "").endswith("/favicon.ico")
        if message.type in {"error", "warning"} and not is_icon:
            self.complaints.append(f"{message.type}: {message.text} ({message.location})")


def _violations(page: Page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "tag", "values": TAGS}}
    found = Axe().run(page, options=options)
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes']]}"
        for each in found.response["violations"]
    ]
