"""Tables of the ledger that do not answer at first."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from dcl_processor.ledger.recording import Work


def failing(
    monkeypatch: pytest.MonkeyPatch, times: float, error: type[Exception] = OperationalError
) -> list[Work]:
    """Let the first tries to write the end of a record fail; return the tries."""
    real, tries = Work.flush, []

    def flush(work: Work, *, is_last: bool = False) -> None:
        if is_last:
            tries.append(work)
            if len(tries) <= times:
                raise error("terminating connection")
        real(work, is_last=is_last)

    monkeypatch.setattr(Work, "flush", flush)
    return tries
