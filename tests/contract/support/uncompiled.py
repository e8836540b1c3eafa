"""Every step is taken with Django's querysets, one statement a message.

``pytest -p tests.contract.support.uncompiled`` lets all processors do so on PostgreSQL, as they do
where the driver's connection is behind a proxy.
"""

from __future__ import annotations

from tests import seams


def pytest_configure() -> None:
    owner, name = seams.SUITS
    setattr(owner, name, lambda *_: False)  # for the process
