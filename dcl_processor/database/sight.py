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
    SELECT unnest('{session_authorization,role,search_path,row_security,TimeZone,
        default_transaction_read_only}'::text[]) AS name
    UNION ALL SELECT DISTINCT found[1] FROM body, regexp_matches(
        sql, E'current_setting\\s*\\(\\s*''(\\w+(?:\\.\\w+)+)''', 'gi') AS found) AS names""",
    "mysql": "SELECT 'database', DATABASE() UNION ALL SELECT 'time_zone', @@SESSION.time_zone "
    "UNION ALL SELECT '{0}', @@SESSION.{0}",
}

#: What PostgreSQL reports to its driver of its own accord: the schemas from version 18 on.
REPORTED: tuple[str, ...] = ("search_path", "default_transaction_read_only")


def sight(connection: Any) -> dict[str, str]:
    """Return what decides which rows a session sees, by name; a value may be a secret."""
    sql = _SIGHT.get(connection.vendor, "SELECT '', ''")
    if connection.vendor == "mysql":
        sql = sql.format("tx_read_only" if connection.mysql_is_mariadb else "transaction_read_only")
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return dict(cursor.fetchall())


class Sees:
    """What the sessions of a run see, and are to see again after a handler."""

    def __init__(self) -> None:
        #: Of ``REPORTED`` before the first handler.
        self.reported: tuple[Any, ...] = ()
        #: Where it decides on rows of the table what the driver does not know.
        self.shared: Shared | None = None

    def note(self, own: Any, shared: Shared | None, *, policies: bool) -> None:
        """Note what a session sees; ``policies``: whether row-level security hides rows."""
        if own.vendor == "postgresql":
            self.reported = tuple(map(own.connection.info.parameter_status, REPORTED))
        if shared is not None and (policies or shared.has_tenant):
            self.shared, shared.has_policies = shared, policies


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
        #: Whether a tenant was chosen, and whether row-level security hides rows.
        self.has_tenant, self.has_policies = bool(self._tenant), False

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
        """Take back what a handler has set that the driver does not report."""
        # Race: flip without work. Another tenant's row may have the same key.
        moved = self.has_policies
        if tenant_of(own) != self._tenant:
            own.set_tenant(*self._tenant)
            moved = True
        if moved:
            put_back(own, self._seen)

    def undo(self) -> None:
        """Leave the session of this thread to a pool as it was."""
        connection = connections[self._using]
        if connection.connection is not None:
            with suppress(DatabaseError):
                _set(connection, self._before.get(connection, {}))


def put_back(connection: Any, seen: dict[str, str]) -> None:
    """Let a session see again what it saw before a handler, and write as it did then."""
    is_broken = connection.needs_rollback
    if is_broken and connection.vendor == "postgresql":
        return  # the rollback takes it back; elsewhere it does not
    connection.needs_rollback = False
    try:
        with suppress(Error):  # of a session that is lost: what replaces it sees the same
            _set(connection, {name: seen[name] for name in _differing(seen, connection)})
    finally:
        connection.needs_rollback = is_broken


def _set(connection: Any, settings: dict[str, str]) -> None:
    with connection.cursor() as cursor:
        for name, value in settings.items():
            if connection.vendor == "postgresql":
                cursor.execute("SELECT set_config(%s, %s, false)", [name, value])
            elif name == "database":
                cursor.execute(f"USE {connection.ops.quote_name(value)}")
            else:
                literal = value if value.isdigit() else f"'{value}'"
                cursor.execute(f"SET SESSION {name} = {literal}")
