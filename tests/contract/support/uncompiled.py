"""Every statement is built for the rows that it is about, as if there was no ``compiled_sql/``.

``pytest -p tests.contract.support.uncompiled`` does so for all processors.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dcl_processor.compiled_sql.cache import StatementCache
from dcl_processor.compiled_sql.claims import ClaimUpdate
from dcl_processor.compiled_sql.placeholders import Placeholder
from dcl_processor.engine import marking


def nothing(*_: Any) -> None:
    """Find no statement that fits every row."""


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("expected nothing of compiled_sql/ to be in use")


def pytest_configure() -> None:
    StatementCache.get = nothing  # type: ignore[assignment, method-assign]  # for the process
    marking.suits = lambda question: False
    for each in (Placeholder, ClaimUpdate):
        each.__init__ = refuse  # type: ignore[method-assign]  # as above
