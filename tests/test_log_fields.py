"""The fields of log records, as a JSON formatter writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.utils import timezone
from pythonjsonlogger.json import JsonFormatter

from dcl_processor import BatchProcessor, Retry
from dcl_processor.insights.rows import show
from dcl_processor.insights.status import status
from dcl_processor.report.errors import (
    LONGEST,
    LONGEST_TEXT,
    LONGEST_TRACEBACK,
    masked,
    shown,
    shown_traceback,
)
from tests.contract.support import errands as the
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

FIELDS = {
    *("processor", "pk", "outcome", "attempt", "duration", "worker", "using", "error_type"),
    *("run_id", "row_count"),
}


@contextmanager
def json_log() -> Iterator[list[dict[str, Any]]]:
    """Collect the records of the package as a JSON formatter writes them."""
    stream, found = StringIO(), list[dict[str, Any]]()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("dcl_processor")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        found += map(json.loads, stream.getvalue().splitlines())


def known(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name in FIELDS}


def test_a_failed_row_has_all_fields() -> None:
    [row] = the.errands(1)

    def fail(_: Errand) -> None:
        raise ValueError("no\nroute\x1b[2J")

    retry = Retry(3, backoff=60, jitter=0)
    processor = the.transactional(fail, retry=retry, name="shop.fail")
    with json_log() as records:
        processor.run()
    failed, end = records
    own = known(failed)
    assert own.pop("duration") >= 0.0
    assert len(own.pop("run_id")) == 32
    assert own == {
        "processor": "shop.fail",
        "pk": str(row.pk),
        "outcome": "failed",
        "attempt": 1,
        "worker": 0,
        "using": "default",
        "error_type": "ValueError",
    }
    assert failed["message"] == (
        f"shop.fail: row {row.pk} failed (attempt 1 of 3, again in 60 s): no route\\x1b[2J"
    )
    assert "ValueError" in failed["exc_info"]
    assert end["run_id"] == failed["run_id"]
    assert (end["row_count"], end["processor"], end["using"]) == (1, "shop.fail", "default")
    assert end["duration"] >= failed["duration"]


def test_text_has_a_masked_and_capped_traceback_and_sentry_the_error_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    the.errands(1)
    told = f"postgres://shop:hunter2@db/x\n{'y' * 10**6}"  # of no database

    def fail(_: Errand) -> None:
        raise ValueError(told)

    with caplog.at_level(logging.ERROR, "dcl_processor"):
        the.transactional(fail).run()
    [record] = caplog.records
    for line in (caplog.text, logging.Formatter().format(record)):
        assert ", in fail\n" in line
        assert "ValueError: postgres://shop:***@db/x\ny" in line
        assert "hunter2" not in line
        assert len(line) <= LONGEST_TRACEBACK + LONGEST_TEXT
    assert record.exc_info is not None
    assert (str(record.exc_info[1]), record.module) == (told, "counters")


def test_no_field_is_one_that_records_have_already() -> None:
    own = vars(logging.LogRecord("n", logging.INFO, "p", 1, "m", (), None))
    assert not FIELDS & {*own, "message", "asctime"}


# --- secrets in the texts of errors are masked, and the texts are capped


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


def test_a_long_text_is_cut_off() -> None:
    """The pattern takes hours for some of these, unless the text is cut off before."""
    many = ("x", "://a:", "password", "a@")
    for text in (*(each * 10**6 for each in many), "://a:" * 3990 + " x"):
        assert len(shown(text, 300)) <= 300
        assert len(masked(text)) <= 2 * LONGEST


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


def test_a_long_traceback_keeps_its_end() -> None:
    lines = [f'  File "{number}.py"' for number in range(10_000)]
    text = "\n".join([*lines, "ValueError: token=hunter2\n"])
    found = shown_traceback(text)
    assert len(found) <= LONGEST_TRACEBACK
    assert found.startswith("  …\n")
    assert found.endswith('\n  File "9999.py"\nValueError: token=***\n')
    short = 'Traceback:\n  File "a.py"\n    x()\n'
    assert shown_traceback(short) == short
    assert shown_traceback("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"


def test_a_handler_of_the_log_that_raises_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise RuntimeError("no room")

    the.errands(1)
    monkeypatch.setattr(logging.getLogger("dcl_processor"), "filters", [fail])
    assert the.transactional(lambda row: 1 / 0)().failed == 1
    assert "no room" in capsys.readouterr().err
