"""One error with markup, 10 MB and a password, in all places that show or keep its text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from dcl_processor import Retry
from dcl_processor.ledger import history
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.report.errors import LONGEST_TEXT, LONGEST_TRACEBACK
from dcl_processor.workers.health import Health
from sample_app.shop.payment_gateway import NotCharged
from tests.admin_page.conftest import NAME, MakePayments
from tests.admin_page.test_page import detail
from tests.test_otel import Exported, exported  # noqa: F401  # a fixture

SECRET = "hunter2"  # noqa: S105  # that of no database
#: A text of 10 MB in several lines, with markup and a connection string.
LONG = f"<script>alert(1)</script>\npostgres://shop:{SECRET}@db/x\n{'y' * 10**7}"


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_one_error_is_masked_capped_and_in_one_line_everywhere(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exported: Exported,  # noqa: F811
    as_user: Callable[[str], Client],
    payments: MakePayments,
    tmp_path: Path,
) -> None:
    (payment,) = payments(1)
    (capture,) = registry.get([NAME])

    def fail(*_: Any) -> None:
        raise NotCharged(LONG)

    monkeypatch.setattr(type(capture), "retry", Retry(max_attempts=1, on=NotCharged))
    monkeypatch.setattr(type(capture), "resource", lambda _: nullcontext())
    monkeypatch.setattr(type(capture), "process", fail)
    out, err = StringIO(), StringIO()
    with caplog.at_level(logging.INFO, "dcl_processor"), pytest.raises(CommandError):
        call_command("processors", "run", NAME, "--json", stdout=out, stderr=err)

    # Each place has a part of the text, so that no place is empty for another reason.
    (failure,) = json.loads(out.getvalue())["failures"]
    lines = [failure["error"], *(each.getMessage() for each in caplog.records)]
    lines += [history(NAME)[0].error]
    lines += [each.status.description for each in exported.spans.get_finished_spans()]
    payment.refresh_from_db()
    lines += [payment.last_error]
    for line in lines:
        assert_safe(line, LONGEST_TEXT + 100)
    assert sum("<script>" in str(line) for line in lines) >= 5

    text = failure["traceback"]
    assert "<script>" in text
    assert "in fail" in text
    assert_safe(text.replace("\n", " "), 2 * LONGEST_TRACEBACK)
    assert_safe(err.getvalue().rstrip(), LONGEST_TEXT + 200)

    page = as_user("viewer").get(detail(NAME)).content.decode()
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert SECRET not in page
    assert "y" * 301 not in page

    health = health_file(tmp_path / "health", NotCharged(LONG))
    assert "<script>" in health
    assert_safe(health, LONGEST_TEXT + 300)


def assert_safe(text: str | None, longest: int) -> None:
    assert len(text or "") <= longest
    assert SECRET not in str(text)
    assert "\n" not in str(text)


def health_file(file: Path, error: Exception) -> str:
    """Return the health file of a service that a trouble keeps from work."""
    (capture,) = registry.get([NAME])
    health = Health([NAME], lambda: False, file)
    health.troubles[NAME] = Trouble.of(error, capture, None).sentence
    health.beat()
    return file.read_text().rstrip()
