"""What a run refuses before its first row, because of the database or the process it runs in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from dcl_processor.engine.calls import can_interrupt
from dcl_processor.options import validation
from dcl_processor.options.options import Definition
from dcl_processor.report.exceptions import Unsupported
from dcl_processor.report.observer import Gates

#: The connections of a pool whose settings give no number.
POOL_SIZE = 4


def refuse_options(
    processor: Definition[Any], connection: Any, gates: Gates, concurrency: int
) -> None:
    """Raise ``Unsupported`` for options that cannot work here."""
    refuse_without_rate(processor, gates)
    refuse_local_time(processor, connection)
    _refuse_concurrency(processor, connection, concurrency)
    _refuse_surroundings(processor, connection, concurrency)
    if not connection.in_atomic_block:
        refuse_small_pool(processor, connection, concurrency)


def refuse_without_rate(processor: Definition[Any], gates: Gates) -> None:
    """Raise if the processor has a ``rate``, and nothing keeps it."""
    keep_rate = any(getattr(each, "keeps_rate", False) for each in gates.all)
    if processor.rate is not None and not keep_rate:
        raise Unsupported(
            f"{processor.name}: expected 'dcl_processor.ledger' in INSTALLED_APPS, and on, for "
            "rate, which all machines keep together, got none; add the app and migrate, or leave "
            "rate out."
        )


def refuse_local_time(processor: Definition[Any], connection: Any) -> None:
    """Raise if columns of the package's own would keep times without a zone."""
    if not processor.has_times or connection.vendor == "postgresql":
        return
    zone = connection.settings_dict["TIME_ZONE"]
    if zone not in (None, "UTC"):
        raise Unsupported(
            f"{processor.name}: expected TIME_ZONE=None or 'UTC' of the alias {connection.alias!r} "
            f"with a lease, claimed_at or next_attempt_at, got {zone!r}; leave it out of DATABASES."
        )
    if not settings.USE_TZ:
        raise Unsupported(
            f"{processor.name}: expected USE_TZ=True with a lease, claimed_at or next_attempt_at "
            f"on {connection.vendor}, whose columns store no zone, got False; set it to True, or "
            "leave these options out."
        )


def refuse_small_pool(processor: Definition[Any], connection: Any, concurrency: int) -> None:
    """Raise unless the alias's pool has a connection for each thread of a run.

    The database calls of all async handlers share a thread.
    """
    pool = connection.settings_dict["OPTIONS"].get("pool")
    if not pool:
        return
    given: Mapping[str, Any] = pool if isinstance(pool, Mapping) else {}
    most = given.get("max_size") or given.get("min_size", POOL_SIZE)
    threads = 1 if processor._is_async else concurrency * (concurrency > 1)
    needed = 1 + threads + (processor.lease is not None)
    if most < needed:
        raise Unsupported(
            f"{processor.name}: expected a connection pool on {connection.alias!r} with room for "
            f"{needed} connections, one for the run, {threads} for threads of handlers, and one "
            f"for the heartbeat of a lease, got max_size={most}; raise max_size in "
            "OPTIONS['pool'], or lower concurrency."
        )


def _refuse_concurrency(processor: Definition[Any], connection: Any, concurrency: int) -> None:
    is_plain = not processor._is_async
    is_limited = is_plain and processor.handler_timeout is not None
    if concurrency > 1 and processor.is_transactional:
        raise Unsupported(
            f"{processor.name}: expected {validation.NO_CONCURRENCY.format(concurrency)}."
        )
    if concurrency > 1 and is_plain and connection.in_atomic_block:
        raise Unsupported(
            f"{processor.name}: expected concurrency=1 with a plain handler inside a TestCase, "
            f"whose rows no other thread sees, got {concurrency}; use TransactionTestCase."
        )
    if is_limited and concurrency > 1:
        raise Unsupported(
            f"{processor.name}: expected concurrency=1 with handler_timeout and a plain handler, "
            f"which only a signal interrupts, got {concurrency}; start more workers, or write an "
            "async handler."
        )
    if is_limited and not can_interrupt():
        raise Unsupported(
            f"{processor.name}: expected a run with handler_timeout in the main thread, whose "
            "handlers a signal can interrupt, got one in another thread; run it in a process of "
            "its own, or write an async handler."
        )


def _refuse_surroundings(processor: Definition[Any], connection: Any, concurrency: int) -> None:
    server = connection.mysql_server_info if connection.vendor == "mysql" else ""
    if "tidb" in server.lower():
        raise Unsupported(
            f"{processor.name}: expected a database on {connection.alias!r} that keeps SKIP "
            f"LOCKED, got {server}, which accepts these words and ignores them, so that two "
            "workers would handle one row; use PostgreSQL, MariaDB or MySQL."
        )
    patched = sys.modules.get("gevent.monkey")
    if processor._is_async and patched and patched.is_module_patched("threading"):
        raise Unsupported(
            f"{processor.name}: expected real threads for an event loop, got threads patched by "
            "gevent; write a plain handler, or run it in a process that is not patched."
        )
    # Of django-tenants: further sessions of the run would see no tenant.
    tenant = getattr(connection, "schema_name", None) or "public"
    if tenant != "public" and (processor.lease or concurrency > 1 or processor._is_async):
        raise Unsupported(
            f"{processor.name}: expected a processor whose only session is that of the run for a "
            f"tenant, got the tenant {tenant!r} and a processor with further sessions, which see "
            "no tenant; choose TRANSACTIONAL, or set the tenant for all sessions by OPTIONS."
        )
