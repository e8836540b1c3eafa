"""Rows that are stuck, and what operators and other sessions do beside the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from django.db import connection
from django.utils import timezone

from tests.models import Errand

#: Apps whose processor gives rows up: without a column for the error, and with one.
DEAD = """
from tests.models import Errand

@batch_processor(
    pending=lambda: Errand.objects.filter(done=False, dead=False),
    done={"done": True},
    failed={"dead": True},
    reset={"dead": False, "done": False},
)
def run(errand): ...
"""
OF_ERRORS = DEAD.replace("reset=", "retry=Retry(), reset=").replace(
    "from tests", "from dcl_processor import Retry\nfrom tests", 1
)


def claimed(minutes: float = 10) -> Errand:
    """Make an errand that was claimed so long ago, and never settled."""
    since = timezone.now() - timedelta(minutes=minutes)
    return Errand.objects.create(claimed=True, claimed_at=since)


@contextmanager
def another_session(statement: str) -> Iterator[None]:
    """Execute a statement in a transaction of another session, which is open in the block."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            # A command that waits without a limit ends, and the test fails.
            cursor.execute("SET idle_in_transaction_session_timeout = '60s'; BEGIN")
            cursor.execute(statement)
            yield
    finally:
        other.close()
