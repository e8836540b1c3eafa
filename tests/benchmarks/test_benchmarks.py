"""The audit of the benchmarks can fail, and the bare driver sends what this package sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.db import connection

from tests.benchmarks import handling
from tests.benchmarks.contenders import ours, raw
from tests.models import Errand
from tests.test_counts import traced

TABLE = "tests_errand."


def sent_by_us(tmp_path: Path, delivery: str, batch_size: int = 1) -> set[str]:
    """Return the statements of a run, less what differs from the bare driver's way of writing."""
    Errand.objects.bulk_create([Errand() for _ in range(6)])
    close = handling.open_log(tmp_path / "log", 0, 0)
    with traced() as sent:
        assert ours.drain(1, delivery=delivery, batch_size=batch_size).handled == 6
    close()
    return {_plain(statement) for message in sent for statement in message.split("; ")}


def _plain(statement: str) -> str:
    plain = " ".join(statement.replace('"', "").replace("dcl_", "").split())
    plain = re.sub(r"(?<!_)\b\d+\b|%s|\$\d+", "?", plain)
    plain = plain.replace("'?'", "?")
    plain = re.sub(r"ANY\('\{[?,]+\}'(::int\d\[\])?\)", "ANY(?)", plain)
    for name in ("pk", "done", "before_0"):
        plain = plain.replace(f" AS {name}", "")
    for addition, without in (("= (?)", "= ?"), (TABLE, "")):
        plain = plain.replace(addition, without)
    # A flip that goes with its COMMIT counts what it writes.
    plain = re.sub(r"^WITH flipped AS \((UPDATE .*) RETURNING \?\) SELECT .*$", r"\1", plain)
    plain = re.sub(r"\(NOT done AND id (= \?|= ANY\(\?\))\)", r"NOT done AND id \1", plain)
    return plain.replace("( ", "(").replace(" )", ")")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="libpq traces PostgreSQL")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_bare_driver_is_given_the_statements_that_we_send(
    tmp_path: Path, batch_size: int
) -> None:
    sent = sent_by_us(tmp_path, "transactional", batch_size)
    keys = list(range(batch_size))
    for statement in (raw.LOCK, raw.FLIP):
        assert _plain(raw.with_keys(statement, keys).decode()) in sent


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="libpq traces PostgreSQL")
def test_the_bare_driver_is_given_the_claim_that_we_send(tmp_path: Path) -> None:
    sent = sent_by_us(tmp_path, "at_most_once")
    assert _plain(raw.with_keys(raw.CLAIM, [1]).decode()) in sent
