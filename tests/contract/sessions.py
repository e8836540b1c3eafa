"""What other sessions do while a run goes on, at points that are forced and not hoped for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper


@contextmanager
def before_statement(where: Callable[[str], bool], act: Callable[[], None]) -> Iterator[list[str]]:
    """Call ``act`` once, just before the first statement that ``where`` recognises.

    Yields the statements of the default connection as they are sent.
    """
    sent: list[str] = []
    acted = False

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        nonlocal acted
        if not acted and where(sql):
            acted = True
            act()
        sent.append(sql)
        return execute(sql, *args)

    with connection.execute_wrapper(wrapper):
        yield sent
    assert acted, f"no statement was recognised among {sent}"


@contextmanager
def connected(options: dict[str, Any], *, autocommit: bool = True) -> Iterator[BaseDatabaseWrapper]:
    """Reconnect the default alias with other options, as another project's settings would."""
    wrapper = connections["default"]
    before = wrapper.settings_dict["OPTIONS"], wrapper.settings_dict["AUTOCOMMIT"]
    wrapper.close()
    wrapper.settings_dict["OPTIONS"] = {**before[0], **options}
    wrapper.settings_dict["AUTOCOMMIT"] = autocommit
    try:
        yield wrapper
    finally:
        wrapper.close()
        wrapper.settings_dict["OPTIONS"], wrapper.settings_dict["AUTOCOMMIT"] = before
