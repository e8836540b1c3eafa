"""Findings about a database, and about the sessions that a project has with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db import connections, transaction

from dcl_processor.definition.kinds import rules_of

from . import catalog
from .findings import Finding, Level, ok
from .statements import Asked

#: Seconds after which a server should have noticed that a worker's machine is gone.
NOTICED_WITHIN = 300

#: Seconds after which a snapshot is old, and transactions after which one of unknown age may be.
OLD_SNAPSHOT, MANY_TRANSACTIONS = 300.0, 1_000


def about(using: str) -> str:
    """Return how findings name a database."""
    return f"database {using!r}"


def requests(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether views have a transaction around them, in which no run may start."""
    if not connections[using].settings_dict["ATOMIC_REQUESTS"]:
        yield ok("atomic-requests", about(using), "views have no transaction around them")
        return
    yield Finding(
        Level.WARNING,
        "atomic-requests",
        about(using),
        "ATOMIC_REQUESTS puts a transaction around each view",
        "A run that a view starts is refused with InsideTransaction, because each row is committed "
        "separately",
        "Start runs from cron, a watcher or Celery, or decorate the view with "
        "transaction.non_atomic_requests",
    )


def writable(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether rows can be locked here: a replica locks none."""
    if _is_writable(using):
        yield ok("read-only", about(using), "rows can be locked and written")
        return
    yield Finding(
        Level.PROBLEM,
        "read-only",
        about(using),
        "the database accepts no writes: it is a replica, or its sessions are read-only",
        "No row can be locked, so no row is handled",
        "Give the processors the primary's alias with using=, or correct the router's "
        "db_for_write()",
    )


def _is_writable(using: str) -> bool:
    match connections[using].vendor:
        case "postgresql":
            sql = "SELECT current_setting('transaction_read_only')"
        case "mysql":
            # The server may be read-only, and so may be the session's transactions.
            sql = (
                "SHOW SESSION VARIABLES WHERE Variable_name IN "
                "('read_only', 'tx_read_only', 'transaction_read_only')"
            )
        case _:
            sql = "PRAGMA query_only"
    return all(value in ("off", "OFF", 0) for *_, value in catalog.rows(using, sql))


def isolation(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find at which isolation level transactions begin that do not choose one."""
    level = _isolation(using)
    if level == "read committed":
        yield ok("isolation", about(using), "transactions begin at READ COMMITTED")
        return
    yield Finding(
        Level.WARNING,
        "isolation",
        about(using),
        f"transactions begin at {level.upper()}",
        "A claim and its second check need READ COMMITTED: a run sets it for its own transactions, "
        "but its single statements, and handlers outside a transaction, fail with serialization "
        "errors when two workers meet, and are repeated",
        "Remove isolation_level from OPTIONS, and default_transaction_isolation (on MariaDB "
        "and MySQL, transaction_isolation) from the role, the database and the server",
    )


def _isolation(using: str) -> str:
    if connections[using].vendor == "mysql":
        sql = (
            "SHOW SESSION VARIABLES WHERE Variable_name IN "
            "('tx_isolation', 'transaction_isolation')"
        )
        return str(catalog.rows(using, sql)[0][1]).lower().replace("-", " ")
    # The level of OPTIONS is sent with each BEGIN, and the session's default does not show it.
    with transaction.atomic(using=using):
        return str(catalog.rows(using, "SHOW transaction_isolation")[0][0])


def pooling(using: str) -> Iterator[Finding]:
    """Find whether a pooler gives the session to another client after each transaction.

    Nothing proves that there is none, so without a proof there is no finding. Not in a transaction,
    which has one session in any case.
    """
    if connections[using].in_atomic_block:
        return
    ours = _pid(connections[using])
    theirs: int | None = None
    other = connections[using].copy()
    try:
        # The pool gives a new client the session that was given back last.
        theirs = _pid(other)
    except Exception:  # noqa: BLE001, S110  # perhaps no room for a second one, and so no proof
        pass
    finally:
        other.close()
    if ours == theirs:
        how = "two connections got the same session"
    elif ours != _pid(connections[using]):
        how = "two statements of one connection got different sessions"
    else:
        return
    yield Finding(
        Level.NOTE,
        "pooler",
        about(using),
        f"{how}: a pooler in transaction mode is in between",
        "LISTEN receives nothing through it, and server-side cursors outside a transaction fail",
        "Give watchers that listen an alias that leads to the server itself, with --using",
    )


def _pid(connection: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def snapshots(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find what keeps dead rows, and dead entries of the pending index, from being removed."""
    found = catalog.snapshots(using)
    timed = [each for each in found if each.seconds is not None]
    old = [each for each in timed if (each.seconds or 0) >= OLD_SNAPSHOT]
    hidden = [
        each for each in found if each.seconds is None and each.transactions >= MANY_TRANSACTIONS
    ]
    for each in old:
        yield _old(using, each, f"has been open for {each.seconds:.0f} s")
    for each in hidden:
        if each.kind == "session":
            yield _hidden(using, each)
        else:
            yield _old(using, each, f"is {each.transactions} transactions old")
    if not old and not hidden:
        yield ok("snapshot", about(using), "no old snapshot keeps dead rows")


def _old(using: str, found: catalog.Snapshot, since: str) -> Finding:
    named = f" ({found.application_name})" if found.application_name else ""
    return Finding(
        Level.WARNING,
        "snapshot",
        about(using),
        f"the {found.kind} {found.name}{named} {since}",
        "Vacuum removes no row that was flipped since, and each lock-free read passes all their "
        "index entries",
        "End it (pg_terminate_backend, pg_drop_replication_slot, ROLLBACK PREPARED); let slow "
        "handlers work outside the transaction with AT_LEAST_ONCE",
    )


def _hidden(using: str, found: catalog.Snapshot) -> Finding:
    return Finding(
        Level.UNKNOWN,
        "snapshot",
        about(using),
        f"since when the session {found.name} of the role {found.role} has been open, which is "
        f"{found.transactions} transactions old",
        "PostgreSQL hides the time of another role's transaction",
        "GRANT pg_read_all_stats to the role of this database",
    )


def lost_hosts(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find how long a row stays locked when the machine of its worker is gone."""
    ((is_local,),) = catalog.rows(using, "SELECT inet_client_addr() IS NULL")
    if is_local:
        yield ok("lost-host", about(using), "the server is on this machine, behind a socket")
        return
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
    found = catalog.settings(using, *names, "tcp_user_timeout")
    idle, interval, count = (found[name].number for name in names)
    unset = [name for name in ("tcp_user_timeout",) if found[name].number == 0]
    seconds = idle + interval * count
    if not unset and seconds <= NOTICED_WITHIN:
        yield ok("lost-host", about(using), f"a lost machine is noticed after {seconds:.0f} s")
        return
    what = "tcp_user_timeout is not set" if unset else f"keepalives take {seconds:.0f} s to fail"
    yield Finding(
        Level.WARNING,
        "lost-host",
        about(using),
        what
        if not unset or seconds <= NOTICED_WITHIN
        else f"{what}, and keepalives take {seconds:.0f} s to fail",
        "When a worker's machine or network is lost, its row stays locked until the server notices",
        "ALTER SYSTEM SET tcp_keepalives_idle = 30, the same for tcp_keepalives_interval = 10, "
        "tcp_keepalives_count = 3 and tcp_user_timeout = 60000, then SELECT pg_reload_conf()",
    )


def idle_transactions(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether a handler that hangs in its transaction keeps its row forever."""
    inside = [each.processor.name for each in asked if rules_of(each.processor).in_transaction]
    if not inside:
        what = "no handler works inside a transaction"
        yield ok("idle-in-transaction", about(using), what)
        return
    name = "idle_in_transaction_session_timeout"
    setting = catalog.settings(using, name)[name]
    if setting.number > 0:
        what = f"{name} is {setting.number / 1000:g} s"
        yield ok("idle-in-transaction", about(using), what)
        return
    yield Finding(
        Level.WARNING,
        "idle-in-transaction",
        about(using),
        f"{name} is not set, and the handlers of {', '.join(inside)} work inside a transaction",
        "A handler that hangs keeps its row, its connection and vacuum's horizon forever",
        f"ALTER ROLE … SET {name} = '5min', or three times the longest handler",
    )
