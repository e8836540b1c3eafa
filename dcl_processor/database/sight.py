"""What decides which rows a session sees; it is the same for all sessions of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import DatabaseError, connections

from dcl_processor.exceptions import Unsupported

# PostgreSQL lists no variable that a session has made. So the names come from the policies of
# row-level security, and from the functions that these call.
_SIGHT = {
    "postgresql": r"""WITH body AS (
    SELECT concat(qual, with_check) AS sql FROM pg_policies
    WHERE schemaname = ANY (current_schemas(false))
    UNION ALL SELECT concat(prosrc, pg_get_function_sqlbody(f.oid)) FROM pg_depend
    JOIN pg_proc f ON refclassid = 'pg_proc'::regclass AND refobjid = f.oid
    WHERE classid = 'pg_policy'::regclass
) SELECT name, coalesce(current_setting(name, true), '') FROM (
    SELECT unnest('{session_authorization,role,search_path,row_security,TimeZone}'::text[]) AS name
    UNION ALL SELECT DISTINCT found[1] FROM body, regexp_matches(
        sql, 'current_setting\(\s*''(\w+(?:\.\w+)+)''', 'g') AS found) AS names""",
    "mysql": "SELECT 'database', DATABASE() UNION ALL SELECT 'time_zone', @@SESSION.time_zone",
}


def sight(connection: Any) -> dict[str, str]:
    """Return what decides which rows a session sees, by name; a value may be a secret."""
    with connection.cursor() as cursor:
        cursor.execute(_SIGHT.get(connection.vendor, "SELECT '', ''"))
        return dict(cursor.fetchall())


def refuse_others(seen: dict[str, str], connection: Any, whose: str, remedy: str) -> None:
    """Raise ``Unsupported`` if a session sees other rows than the run's own; ``whose`` it is."""
    if others := _differing(seen, connection):
        raise Unsupported(
            f"{whose} to see what the session on {connection.alias!r} sees, got other values of "
            f"{', '.join(others)}; set them by OPTIONS or connection_created, or {remedy}."
        )


def _differing(seen: dict[str, str], connection: Any) -> dict[str, str]:
    found = sight(connection)
    return {name: found.get(name, "") for name in seen if found.get(name, "") != seen[name]}


def tenant_of(own: Any) -> tuple[Any, ...]:
    """Return the arguments of django-tenants' ``set_tenant()``; each cursor sets the schema."""
    return (own.tenant, own.include_public_schema) if hasattr(own, "set_tenant") else ()


class Shared:
    """What the session of a run sees, for further sessions of the run."""

    def __init__(self, using: str) -> None:
        own = connections[using]
        self._using, self._tenant = using, tenant_of(own)
        self._seen, self._before = dict[str, str](), dict[str, str]()
        if own.vendor == "postgresql":
            # The settlement finds out that a session was ended meanwhile.
            with suppress(DatabaseError):
                self._seen = sight(own)

    def share(self, other: Any) -> None:
        """Let a new session of the same alias see the same; one of another is left alone."""
        if other.alias != self._using or not self._seen:
            return
        if self._tenant:
            other.set_tenant(*self._tenant)
        try:
            self._before = _differing(self._seen, other)
            self._choose(other, self._seen)
        except BaseException:
            other.close()
            raise

    def undo(self) -> None:
        """Leave the session of this thread to a pool as it was."""
        connection = connections[self._using]
        if connection.connection is not None:
            with suppress(DatabaseError):
                self._choose(connection, self._before)

    def _choose(self, connection: Any, settings: dict[str, str]) -> None:
        with connection.cursor() as cursor:
            for name in self._before:
                cursor.execute("SELECT set_config(%s, %s, false)", [name, settings[name]])
