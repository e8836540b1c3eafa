"""The bare driver sends what this package sends."""

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


def _plain(statement: str) -> str:
    """Leave out what differs from the bare driver's way of writing."""
    plain = " ".join(statement.replace('"', "").replace("dcl_", "").split())
    plain = re.sub(r"(?<!_)\b\d+\b|%s|\$\d+", "?", plain)
    plain = plain.replace("'?'", "?")
    plain = re.sub(r"ANY\('\{[?,]+\}'(::int\d\[\])?\)", "ANY(?)", plain)
    plain = plain.replace(TABLE, "")
    # A flip that goes with its COMMIT asks what it has written.
    plain = re.sub(r"^WITH flipped \(still\) AS \((UPDATE .*?) RETURNING .*$", r"\1", plain)
    plain = re.sub(r"\(NOT done AND id (= ANY\(\?\))\)", r"NOT done AND id \1", plain)
    return plain.replace("( ", "(").replace(" )", ")")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="libpq traces PostgreSQL")
def test_the_bare_driver_is_given_the_statements_that_we_send(tmp_path: Path) -> None:
    Errand.objects.bulk_create([Errand() for _ in range(6)])
    close = handling.open_log(tmp_path / "log", 0)
    with traced() as messages:
        assert ours.drain(batch_size=3).handled == 6
    close()
    sent = {_plain(each) for message in messages for each in message.split("; ")}
    for statement in (raw.LOCK, raw.FLIP):
        assert _plain(statement) in sent
