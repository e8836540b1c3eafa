"""Secrets in the texts of errors are masked, and the texts are capped."""

from __future__ import annotations

import time

import pytest
from django.utils import timezone

from dcl_processor import BatchProcessor, Retry
from dcl_processor.insights.row import show
from dcl_processor.insights.status import status
from dcl_processor.masking import LONGEST, LONGEST_TRACEBACK, masked, shown, shown_traceback
from tests.contract.support import errands as the
from tests.models import Errand


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://shop:hunter2@db:5432/x", "postgres://shop:***@db:5432/x"),
        ("redis://:hunter2@cache/0 refused", "redis://:***@cache/0 refused"),
        ("amqp://shop:hun@ter2@mq", "amqp://shop:***@mq"),
        ("postgres://shop:hunter2", "postgres://shop:***"),
        ("http://host:8080/path", "http://host:8080/path"),
        ("see http://host:8080", "see http://host:8080"),
        ("host=db password=hunter2 user=x", "host=db password=*** user=x"),
        ("host=db password='hun ter2' user=x", "host=db password=*** user=x"),
        ('{"password": "hunter2", "a": 1}', '{"password": ***, "a": 1}'),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=***"),
        ("api-key: hunter2;", "api-key: ***;"),
        ("Authorization: Basic aHVudGVyMg==", "Authorization: Basic ***"),
        ("sent bearer hunter2hunter2", "sent bearer ***"),
        ("no route to the gateway", "no route to the gateway"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


def test_a_long_text_is_cut_off_quickly() -> None:
    many = ("x", "://a:", "password", "a@")
    for text in (*(each * 10**6 for each in many), "://a:" * 3990 + " x"):
        start = time.process_time()
        assert len(shown(text, 300)) <= 300
        assert len(masked(text)) <= 2 * LONGEST
        assert time.process_time() - start < 1.0


@pytest.mark.django_db(transaction=True)
def test_an_error_is_masked_where_it_is_kept_and_where_it_is_shown() -> None:
    address = "postgres://shop:hunter2@db/x"

    def handle(row: Errand) -> None:
        raise ValueError(f"<script> {address} " + "y" * 10**7)

    processor: BatchProcessor[Errand] = the.transactional(
        handle, retry=Retry(max_attempts=1), failed={"dead": True}
    )
    the.errands(1)
    processor()
    row = Errand.objects.get()
    assert "hunter2" not in row.last_error
    assert len(row.last_error) == 2_000

    # As an older version, or another program, has written it.
    Errand.objects.update(last_error=f"ValueError: {address}", next_attempt_at=timezone.now())
    found = show(processor, row.pk)
    assert "hunter2" not in str(found.as_dict())
    assert "hunter2" not in str(status(processor).as_dict())


def test_a_long_traceback_keeps_both_ends() -> None:
    lines = [f'  File "{number}.py"' for number in range(10_000)]
    text = "\n".join(["Traceback: password=hunter2", *lines, "ValueError: token=hunter2\n"])
    found = shown_traceback(text)
    assert len(found) <= LONGEST_TRACEBACK
    assert found.startswith('Traceback: password=***\n  File "0.py"\n')
    assert found.endswith('\n  File "9999.py"\nValueError: token=***\n')
    assert found.count("\n  …\n") == 1
    short = 'Traceback:\n  File "a.py"\n    x()\n'
    assert shown_traceback(short) == short
    assert shown_traceback("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"
