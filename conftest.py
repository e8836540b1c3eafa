"""Run the code blocks of README.md and docs/ as tests.

The blocks of one page share their names. Their rows they do not share: each block begins with a
fresh shop, so that it says all that it depends on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone
from sybil import Sybil

from sample_app.mail_settings import in_this_django
from tests.docs.blocks import PARSERS

pytest_plugins = ["tests.shares", "tests.strict"]

MAILBOX = "django.core.mail.backends.locmem.EmailBackend"


def _as_in_the_shop(namespace: dict[str, Any]) -> None:
    # Functions defined on a page say that they come from here, and get their names from it.
    namespace["__name__"] = "sample_app.shop.processors"


@pytest.fixture
def shop(
    transactional_db: None,  # noqa: ARG001  # asked for by name
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Give the block a mailbox, and a shop with three shipped orders and one that is not.

    The pages import from ``shop``, as from an app of the reader's own.
    """
    from sample_app import shop
    from sample_app.shop import models, processors
    from sample_app.shop.models import Customer, Order

    for module in (shop, models, processors):
        monkeypatch.setitem(sys.modules, module.__name__.removeprefix("sample_app."), module)

    customer = Customer.objects.create(code="ANNA", company="Café Anna", email="anna@example.com")
    for number in range(1, 5):
        Order.objects.create(
            number=number,
            customer=customer,
            order_date=date(2024, 5, 1),
            required_date=date(2024, 5, 29),
            shipped_at=timezone.now() if number < 4 else None,
            freight="7.50",
        )
    # Only the page on the ledger has it; the others show what a run does without it.
    has_ledger = request.node.path.name == "ledger.md"
    own = {**in_this_django({"EMAIL_BACKEND": MAILBOX}), "DCL_PROCESSOR_LEDGER": has_ledger}
    with override_settings(**own):
        yield


pytest_collect_file = Sybil(
    parsers=PARSERS,
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=_as_in_the_shop,
    excludes=["docs/tutorial.md"],  # tests/docs/test_adopt.py follows it in a folder of its own
    fixtures=["shop"],
).pytest()
