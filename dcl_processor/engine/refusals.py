"""What a run refuses before its first row, because of the database or the process it runs in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from dcl_processor.engine.calls import refuse_alarm
from dcl_processor.options import validation
from dcl_processor.options.options import Definition
from dcl_processor.report.exceptions import Unsupported
from dcl_processor.report.observer import Gates
from dcl_processor.report.values import refuse

#: The connections of a pool whose settings give no number.
POOL_SIZE = 4


def refuse_options(
    processor: Definition[Any], connection: Any, gates: Gates, concurrency: int
) -> None:
    """Raise ``Unsupported`` for options that cannot work here."""
    refuse_without_rate(processor, gates)
    refuse_local_time(processor, connection)
    _refuse_concurrency(processor, connection, concurrency)
    _refuse_tenant(processor, connection, concurrency)
    if not connection.in_atomic_block:
        refuse_small_pool(processor, connection, concurrency)


def refuse_without_rate(processor: Definition[Any], gates: Gates) -> None:
    """Raise if the processor has a ``rate``, and nothing keeps it."""
    refuse(
        processor.name,
        processor.rate is not None and not gates.keep_rate,
        Unsupported,
        "'dcl_processor.ledger' in INSTALLED_APPS, and on, for rate, which all machines keep "
        "together, got none; add the app and migrate, or leave rate out",
    )


def refuse_local_time(processor: Definition[Any], connection: Any) -> None:
    """Raise if columns of the package's own would keep times without a zone."""
    if not processor.has_times or connection.vendor == "postgresql":
        return
    zone = connection.settings_dict["TIME_ZONE"]
    refuse(
        processor.name,
        zone not in (None, "UTC"),
        Unsupported,
        f"TIME_ZONE=None or 'UTC' of the alias {connection.alias!r} with a lease, claimed_at or "
        f"next_attempt_at, got {zone!r}; leave it out of DATABASES",
    )
    refuse(
        processor.name,
        not settings.USE_TZ,
        Unsupported,
        f"USE_TZ=True with a lease, claimed_at or next_attempt_at on {connection.vendor}, whose "
        "columns store no zone, got False; set it to True, or leave these options out",
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
    refuse(
        processor.name,
        most < needed,
        Unsupported,
        f"a connection pool on {connection.alias!r} with room for {needed} connections, one for "
        f"the run, {threads} for threads of handlers, and one for the heartbeat of a lease, got "
        f"max_size={most}; raise max_size in OPTIONS['pool'], or lower concurrency",
    )


def _refuse_concurrency(processor: Definition[Any], connection: Any, concurrency: int) -> None:
    several_plain = concurrency > 1 and not processor._is_async
    refuse(
        processor.name,
        concurrency > 1 and processor.is_transactional,
        Unsupported,
        validation.NO_CONCURRENCY.format(concurrency),
    )
    refuse(
        processor.name,
        several_plain and connection.in_atomic_block,
        Unsupported,
        "concurrency=1 with a plain handler inside a TestCase, whose rows no other thread sees, "
        f"got {concurrency}; use TransactionTestCase",
    )
    patched = sys.modules.get("gevent.monkey")
    refuse(
        processor.name,
        processor._is_async and patched and patched.is_module_patched("threading"),
        Unsupported,
        "real threads for an event loop, got threads patched by gevent; write a plain handler, or "
        "run it in a process that is not patched",
    )
    if processor.handler_timeout is not None and not processor._is_async:
        refuse(
            processor.name,
            several_plain,
            Unsupported,
            "concurrency=1 with handler_timeout and a plain handler, which only a signal "
            f"interrupts, got {concurrency}; start more workers, or write an async handler",
        )
        refuse_alarm(processor.name)


def _refuse_tenant(processor: Definition[Any], connection: Any, concurrency: int) -> None:
    """Raise if further sessions of the run would not see the tenant of django-tenants."""
    tenant = getattr(connection, "schema_name", None) or "public"
    refuse(
        processor.name,
        tenant != "public" and (processor.lease or concurrency > 1 or processor._is_async),
        Unsupported,
        "a processor whose only session is that of the run for a tenant, got the tenant "
        f"{tenant!r} and a processor with further sessions, which see no tenant; choose "
        "TRANSACTIONAL, or set the tenant for all sessions by OPTIONS",
    )
