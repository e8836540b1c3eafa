"""Findings about a database, and about the sessions that a project has with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db import connections, transaction

from dcl_processor.definition.kinds import rules_of

from . import catalog
from .answer import Finding, Level, ok, problem, unknown, warning
from .statements import Asked

#: Seconds after which a server should have noticed that a worker's machine is gone.
NOTICED_WITHIN = 300

#: Seconds after which a snapshot is old, and transactions after which one of unknown age may be.
OLD_SNAPSHOT, MANY_TRANSACTIONS = 300.0, 1_000


def requests(using: str) -> Iterator[Finding]:
    """Find whether views have a transaction around them, in which no run may start."""
    if not connections[using].settings_dict["ATOMIC_REQUESTS"]:
        yield ok("views have no transaction around them")
        return
    yield warning(
        "ATOMIC_REQUESTS puts a transaction around each view",
        "A run that a view starts is refused with InsideTransaction, because each row is committed "
        "separately",
        "Start runs from cron, a watcher or Celery, or decorate the view with "
        "transaction.non_atomic_requests",
    )


def writable(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether rows can be locked here: a replica locks none."""
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
    if all(value in ("off", "OFF", 0) for *_, value in catalog.rows(using, sql)):
        yield ok("rows can be locked and written")
        return
    yield problem(
        "the database accepts no writes: it is a replica, or its sessions are read-only",
        "No row can be locked, so no row is handled",
        "Give the processors the primary's alias with using=, or correct the router's "
        "db_for_write()",
    )


def isolation(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find at which isolation level transactions begin that do not choose one."""
    if connections[using].vendor == "mysql":
        sql = (
            "SHOW SESSION VARIABLES WHERE Variable_name IN "
            "('tx_isolation', 'transaction_isolation')"
        )
        level = str(catalog.rows(using, sql)[0][1]).lower().replace("-", " ")
    else:
        # The level of OPTIONS is sent with each BEGIN; the session's default does not show it.
        with transaction.atomic(using=using):
            level = str(catalog.rows(using, "SHOW transaction_isolation")[0][0])
    if level == "read committed":
        yield ok("transactions begin at READ COMMITTED")
        return
    yield warning(
        f"transactions begin at {level.upper()}",
        "A claim and its second check need READ COMMITTED: a run sets it for its own transactions, "
        "but its single statements, and handlers outside a transaction, fail with serialization "
        "errors when two workers meet, and are repeated",
        "Remove isolation_level from OPTIONS, and default_transaction_isolation (on MariaDB "
        "and MySQL, transaction_isolation) from the role, the database and the server",
    )


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
    is_clean = True
    for each in catalog.snapshots(using):
        named = f" ({each.application_name})" if each.application_name else ""
        if each.seconds is not None:
            is_old = each.seconds >= OLD_SNAPSHOT
            since = f"has been open for {each.seconds:.0f} s"
        else:
            is_old = each.transactions >= MANY_TRANSACTIONS
            since = f"is {each.transactions} transactions old"
        if not is_old:
            continue
        is_clean = False
        if each.seconds is None and each.kind == "session":
            yield unknown(
                f"since when the session {each.name} of the role {each.role} has been open, which "
                f"{since}",
                "PostgreSQL hides the time of another role's transaction",
                "GRANT pg_read_all_stats to the role of this database",
            )
            continue
        yield warning(
            f"the {each.kind} {each.name}{named} {since}",
            "Vacuum removes no row that was flipped since, and each lock-free read passes all "
            "their index entries",
            "End it (pg_terminate_backend, pg_drop_replication_slot, ROLLBACK PREPARED); let slow "
            "handlers work outside the transaction with AT_LEAST_ONCE",
        )
    if is_clean:
        yield ok("no old snapshot keeps dead rows")


def lost_hosts(using: str, _: Sequence[Asked]) -> Iterator[Finding]:
    """Find how long a row stays locked when the machine of its worker is gone."""
    ((is_local,),) = catalog.rows(using, "SELECT inet_client_addr() IS NULL")
    if is_local:
        yield ok("the server is on this machine, behind a socket")
        return
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
    found = catalog.settings(using, *names, "tcp_user_timeout")
    idle, interval, count = (float(found[name]) for name in names)
    seconds = idle + interval * count
    faults = ["tcp_user_timeout is not set"] if float(found["tcp_user_timeout"]) == 0 else []
    faults += [f"keepalives take {seconds:.0f} s to fail"] if seconds > NOTICED_WITHIN else []
    if not faults:
        yield ok(f"a lost machine is noticed after {seconds:.0f} s")
        return
    yield warning(
        ", and ".join(faults),
        "When a worker's machine or network is lost, its row stays locked until the server notices",
        "ALTER SYSTEM SET tcp_keepalives_idle = 30, the same for tcp_keepalives_interval = 10, "
        "tcp_keepalives_count = 3 and tcp_user_timeout = 60000, then SELECT pg_reload_conf()",
    )


def idle_transactions(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether a handler that hangs in its transaction keeps its row forever."""
    inside = [each.processor.name for each in asked if rules_of(each.processor).in_transaction]
    name = "idle_in_transaction_session_timeout"
    milliseconds = float(catalog.settings(using, name)[name])
    if not inside:
        yield ok("no handler works inside a transaction")
    elif milliseconds > 0:
        yield ok(f"{name} is {milliseconds / 1000:g} s")
    else:
        yield warning(
            f"{name} is not set, and the handlers of {', '.join(inside)} work inside a transaction",
            "A handler that hangs keeps its row, its connection and vacuum's horizon forever",
            f"ALTER ROLE … SET {name} = '5min', or three times the longest handler",
        )
