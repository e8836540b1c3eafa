"""What other sessions do while a run goes on, at points that are forced and not hoped for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.contract.support.messages import separately


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

    with separately(), connection.execute_wrapper(wrapper):
        yield sent
    assert acted, f"no statement was recognised among {sent}"


@contextmanager
def connected(
    options: dict[str, Any], *, autocommit: bool = True, time_zone: str | None = None
) -> Iterator[BaseDatabaseWrapper]:
    """Reconnect the default alias with other settings, as another project's would be."""
    wrapper = connections["default"]
    said = wrapper.settings_dict
    before = {name: said[name] for name in ("OPTIONS", "AUTOCOMMIT", "TIME_ZONE")}
    others = {**before["OPTIONS"], **options}
    _reconnect(wrapper, {"OPTIONS": others, "AUTOCOMMIT": autocommit, "TIME_ZONE": time_zone})
    try:
        yield wrapper
    finally:
        _reconnect(wrapper, before)


def _reconnect(wrapper: BaseDatabaseWrapper, said: dict[str, Any]) -> None:
    wrapper.close()
    wrapper.settings_dict.update(said)
    for remembered in ("timezone", "timezone_name"):
        vars(wrapper).pop(remembered, None)
