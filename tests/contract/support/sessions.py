"""What other sessions do while a run goes on, at points that are forced and not hoped for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from threading import Event
from typing import Any

from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet

from tests.contract.support.errands import meanwhile, sessions, wait
from tests.contract.support.messages import separately
from tests.waiting import until


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
def uncommitted(act: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Have another session act in a transaction that is open until the end of the block.

    Yields a function that has it committed before.
    """
    has_acted, go_on, has_ended = Event(), Event(), Event()

    def work() -> None:
        with transaction.atomic():
            act()
            has_acted.set()
            wait(go_on)
        has_ended.set()

    def commit() -> None:
        go_on.set()
        wait(has_ended)

    with meanwhile(work) as results:
        try:
            wait(has_acted)
            yield commit
        finally:
            go_on.set()
    assert results == [None], results


def part_locked(model: type[Model], pk: Any) -> AbstractContextManager[Any]:
    """Have another session lock a row of one table, as an update of it does."""
    rows = QuerySet[Any](model).filter(pk=pk).order_by()
    locking = rows.select_for_update(no_key=connection.features.has_select_for_no_key_update)
    key = [field.attname for field in model._meta.pk_fields]
    return uncommitted(lambda: list(locking.values_list(*key)))


def end_session(session: Any = connection) -> None:
    """End a session from another one, and wait until it has gone, locks and all.

    ``session``: its number, or the connection that has it. On SQLite, close the connection.
    """
    if connection.vendor == "sqlite":
        session.close()
        return
    if not isinstance(session, int):
        session.ensure_connection()
        driver = session.connection
        # Not asked of the session itself: a question would open a transaction where none is open.
        session = driver.thread_id() if connection.vendor == "mysql" else driver.info.backend_pid
    with closing(connection.copy()) as other, other.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("KILL %s", [session])
            until_gone(session)
        else:
            cursor.execute("SELECT pg_terminate_backend(%s, 30000)", [session])
            assert cursor.fetchone() == (True,)


def until_ended(session: Any) -> None:
    """Wait until the server itself has ended the session that a connection has, locks and all."""
    driver = session.connection
    number = driver.thread_id() if connection.vendor == "mysql" else driver.info.backend_pid
    until(lambda: number not in sessions("other"))


def until_gone(session: int) -> None:
    """Wait until MariaDB has rolled a session back, which it does behind the end of its socket."""
    listed = "SELECT count(*) FROM information_schema.processlist WHERE id = %s"
    with closing(connection.copy()) as other, other.cursor() as cursor:
        until(lambda: cursor.execute(listed, [session]) and cursor.fetchone() == (0,))


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


def time_limits() -> Any:
    """Return the limits of the session, where it has any."""
    if connection.vendor == "sqlite":
        return None
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"
            if connection.vendor == "postgresql"
            else "SELECT @@SESSION.max_statement_time, @@SESSION.innodb_lock_wait_timeout,"
            " @@SESSION.lock_wait_timeout"
        )
        return cursor.fetchone()
