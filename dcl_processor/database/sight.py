"""What decides which rows a session sees; it is the same for all sessions of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import DatabaseError, Error, connections
from django.db.backends.signals import connection_created

from dcl_processor.exceptions import Unsupported

# PostgreSQL lists no variable that a session has made. So the names come from the policies of
# row-level security, from all functions, because policies call some, and from views.
_SIGHT = {
    # Objects of users have numbers from 16384 on; 2077 and 3294 are current_setting().
    "postgresql": r"""WITH body AS (
    SELECT concat(pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid)) AS sql
    FROM pg_policy
    UNION ALL SELECT concat(prosrc, pg_get_function_sqlbody(oid)) FROM pg_proc
    WHERE oid >= 16384 AND prorettype <> 'trigger'::regtype
    UNION ALL SELECT pg_get_viewdef(ev_class) FROM pg_rewrite
    WHERE oid >= 16384 AND rulename = '_RETURN' AND ev_action::text ~ ':funcid (2077|3294) '
) SELECT name, coalesce(current_setting(name, true), '') FROM (
    SELECT unnest('{session_authorization,role,search_path,row_security,TimeZone}'::text[]) AS name
    UNION ALL SELECT DISTINCT found[1] FROM body, regexp_matches(
        sql, E'current_setting\\s*\\(\\s*''(\\w+(?:\\.\\w+)+)''', 'gi') AS found) AS names""",
    "mysql": "SELECT 'database', DATABASE() UNION ALL SELECT 'time_zone', @@SESSION.time_zone",
}


def sight(connection: Any) -> dict[str, str]:
    """Return what decides which rows a session sees, by name; a value may be a secret."""
    with connection.cursor() as cursor:
        cursor.execute(_SIGHT.get(connection.vendor, "SELECT '', ''"))
        return dict(cursor.fetchall())


def refuse_others(seen: dict[str, str], connection: Any) -> None:
    """Raise ``Unsupported`` if a worker's session sees other rows than this process's."""
    if others := _differing(seen, connection):
        raise Unsupported(
            f"expected workers to see what the session on {connection.alias!r} sees, got other "
            f"values of {', '.join(others)}; set them by OPTIONS or connection_created, or run one "
            "worker."
        )


def _differing(seen: dict[str, str], connection: Any) -> dict[str, str]:
    found = sight(connection)
    return {name: found.get(name, "") for name in seen if found.get(name, "") != seen[name]}


def tenant_of(own: Any) -> tuple[Any, ...]:
    """Return the arguments of django-tenants' ``set_tenant()``; each cursor sets the schema."""
    return (own.tenant, own.include_public_schema) if hasattr(own, "set_tenant") else ()


class Shared:
    """What the session of a run sees, for its further sessions, and for those that replace them."""

    def __init__(self, using: str) -> None:
        own: Any = connections[using]
        self._using, self._tenant, self._seen = using, tenant_of(own), dict[str, str]()
        #: The connections that see the same, with what they had before.
        self._before: dict[Any, dict[str, str]] = {own: {}}
        if own.vendor in _SIGHT:
            self._seen = sight(own)
            # Otherwise a session that replaces a lost one sees another tenant's rows, perhaps under
            # the same keys.
            connection_created.connect(self._replace)
        #: Whether a schema or a tenant was chosen, and whether row-level security hides rows.
        usual = {None, '"$user", public'}
        self.is_chosen = bool(self._tenant) or self._seen.get("search_path") not in usual
        self.has_policies = False

    def close(self) -> None:
        """Leave further sessions alone."""
        connection_created.disconnect(self._replace)

    def share(self, other: Any) -> None:
        """Let the sessions of a connection see the same; one of another alias is left alone."""
        if other.alias != self._using or not self._seen:
            return
        if self._tenant:
            other.set_tenant(*self._tenant)
        self._before.setdefault(other, {})
        if other.connection is None:
            other.ensure_connection()
        else:
            self._replace(connection=other)

    def _replace(self, *, connection: Any, **_: Any) -> None:
        if connection not in self._before:
            return
        try:
            if before := _differing(self._seen, connection):
                self._before[connection] = before
                _set(connection, {name: self._seen[name] for name in before})
        except BaseException:
            connection.close()
            raise

    def keep(self, own: Any) -> None:
        """Take back what a handler has set that decides which rows its session sees."""
        # The driver knows the schemas from PostgreSQL 18 on, and no other variable.
        pgconn, moved = getattr(own.connection, "pgconn", None), self.has_policies
        if pgconn and not pgconn.status and (path := pgconn.parameter_status(b"search_path")):
            moved = moved or path.decode() != self._seen["search_path"]
        if tenant_of(own) != self._tenant:
            own.set_tenant(*self._tenant)
            moved = True
        with suppress(Error):  # of a session that is lost: what replaces it sees the same
            if moved and not own.needs_rollback:
                names = _differing(self._seen, own)
                _set(own, {name: self._seen[name] for name in names})

    def undo(self) -> None:
        """Leave the session of this thread to a pool as it was."""
        connection = connections[self._using]
        if connection.connection is not None:
            with suppress(DatabaseError):
                _set(connection, self._before.get(connection, {}))


def _set(connection: Any, settings: dict[str, str]) -> None:
    with connection.cursor() as cursor:
        for name, value in settings.items():
            if connection.vendor == "postgresql":
                cursor.execute("SELECT set_config(%s, %s, false)", [name, value])
            elif name == "database":
                cursor.execute(f"USE {connection.ops.quote_name(value)}")
            else:
                cursor.execute("SET time_zone = %s", [value])
