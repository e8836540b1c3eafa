"""``manage.py processors doctor``: each finding is provoked on a real server, and then fixed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
import pytest
from django.db import connection
from django.db.models import Model
from django.test import override_settings

from dcl_processor.insights import doctor as insights
from dcl_processor.insights.doctor import Level
from tests.contract.support.temporary import execute, temporary
from tests.databases import other
from tests.edge.manage import Install, Manage
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DELIVER = "warehouse.deliver"


class Examined(NamedTuple):
    """What one call of the command said: the exit code, and the findings by their check."""

    code: object
    found: dict[str, list[dict[str, Any]]]

    def level(self, check: str) -> str:
        (finding,) = self.found[check]
        return str(finding["level"])

    def what(self, check: str) -> str:
        return " | ".join(str(each["what"]) for each in self.found[check])


def doctor(manage: Manage, *arguments: str) -> Examined:
    done = manage("doctor", *(arguments or (DELIVER,)), "--json")
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.out):
        found.setdefault(each["check"], []).append(each)
    return Examined(done.code, found)


def parcels(number: int, **values: Any) -> None:
    Parcel.objects.bulk_create(Parcel(**values) for _ in range(number))
    execute("VACUUM ANALYZE tests_parcel")


@pytest.fixture
def role() -> Iterator[str]:
    """Make a role that may use the tables, and nothing else; ``other`` connects as this role."""
    name = f"dcl_doctor_{secrets.token_hex(4)}"
    with (
        temporary(
            f"CREATE ROLE {name} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}",
            f"DROP OWNED BY {name}; DROP ROLE {name}",
        ),
        other(USER=name),
        override_settings(DATABASE_ROUTERS=[ReadsOther()]),
    ):
        yield name


class ReadsOther:
    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return "other"


@contextmanager
def session() -> Iterator[psycopg.Connection[Any]]:
    """Open a transaction in a session that the command does not close."""
    config = connection.settings_dict
    with psycopg.connect(
        host=config["HOST"], port=config["PORT"], user=config["USER"], dbname=config["NAME"]
    ) as opened:
        yield opened
        opened.rollback()


# --- the session


@pytest.mark.parametrize(
    ("setting", "value", "check", "level", "fixed"),
    [
        ("default_transaction_read_only", "on", "flip", "problem", ""),
        ("idle_in_transaction_session_timeout", "0", "idle-in-transaction", "warning", "5min"),
    ],
)
def test_a_setting_of_the_role_is_found(
    manage: Manage, role: str, setting: str, value: str, check: str, level: str, fixed: str
) -> None:
    execute(f"ALTER ROLE {role} SET {setting} = '{value}'")
    bad = doctor(manage, DELIVER, "--using", "other")
    assert (bad.code, bad.level(check)) == (1, level)
    assert all(bad.found[check][0][part] for part in ("what", "why", "fix"))
    execute(
        f"ALTER ROLE {role} SET {setting} = '{fixed}'" if fixed else f"ALTER ROLE {role} RESET ALL"
    )
    good = doctor(manage, DELIVER, "--using", "other")
    assert good.level(check) == "ok"


def levels_of_session(found: Any, pid: int) -> list[str]:
    """Return what is found of one session: the server's own processes have snapshots, too."""
    return [
        each["level"] for each in found.found["snapshot"] if f"of session {pid}, " in each["what"]
    ]


@pytest.mark.parametrize(
    ("level", "statement"),
    [
        (psycopg.IsolationLevel.REPEATABLE_READ, "SELECT 1"),
        # A handler that hangs has no snapshot, and its transaction has an id.
        (psycopg.IsolationLevel.READ_COMMITTED, "SELECT id FROM tests_parcel FOR UPDATE"),
    ],
)
def test_an_old_snapshot_and_a_row_lock_in_an_open_transaction_are_found(
    manage: Manage, monkeypatch: pytest.MonkeyPatch, level: Any, statement: Any
) -> None:
    monkeypatch.setattr(insights, "OLD", 0.0)
    parcels(1)
    with session() as opened:
        opened.isolation_level = level
        opened.execute(statement)
        pid = opened.info.backend_pid
        assert levels_of_session(doctor(manage), pid) == ["warning"]
    assert levels_of_session(doctor(manage), pid) == []


def test_a_database_that_does_not_answer_could_not_be_found_out(manage: Manage) -> None:
    reads_other = override_settings(DATABASE_ROUTERS=[ReadsOther()])
    with other(NAME="there_is_no_such_database"), reads_other:
        found = doctor(manage, DELIVER, "--using", "other")
    assert (found.code, found.level("connection")) == (3, "unknown")
    assert "there_is_no_such_database" in found.what("connection")


@pytest.mark.parametrize(
    ("granted", "refused"),
    [
        ("note, sent", ""),
        ("note", "permission denied for table tests_parcel"),
        ("", "permission denied for table tests_parcel"),
    ],
)
@pytest.mark.parametrize("rows", [0, 1])
def test_a_right_that_a_flip_needs_is_found_with_or_without_a_row(
    manage: Manage, role: str, granted: str, refused: str, rows: int
) -> None:
    """The right to UPDATE a column is enough for the lock, and the flip needs that of its own."""
    execute(f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '5min'")
    parcels(rows)
    execute(f"REVOKE UPDATE ON tests_parcel FROM {role}")
    if granted:
        execute(f"GRANT UPDATE ({granted}) ON tests_parcel TO {role}")
    found = doctor(manage, DELIVER, "--using", "other")
    assert (found.code, found.level("flip")) == ((1, "problem") if refused else (0, "ok"))
    assert refused in found.what("flip")
    assert not Parcel.objects.filter(sent=True).exists()


def test_a_refused_flip_is_named_in_the_words_of_a_dry_run(manage: Manage) -> None:
    """The right is there, and the table's constraint refuses the value."""
    parcels(1)
    assert doctor(manage).level("flip") == "ok"
    with temporary(
        "ALTER TABLE tests_parcel ADD CONSTRAINT doctor_never CHECK (NOT sent)",
        "ALTER TABLE tests_parcel DROP CONSTRAINT doctor_never",
    ):
        found = doctor(manage)
        dry = manage("run", DELIVER, "--dry-run")
    assert (found.code, found.level("flip")) == (1, "problem")
    said = found.what("flip")
    assert "doctor_never" in said
    assert said in f"{dry.out}{dry.err}"


# --- the processors


def test_handlers_that_read_elsewhere_are_found(manage: Manage) -> None:
    with override_settings(DATABASE_ROUTERS=[ReadsOther()]):
        found = doctor(manage)
        assert found.level("router") == "warning"
        assert "locked on 'default', and what handlers read goes to 'other'" in found.what("router")
    assert doctor(manage).level("router") == "ok"


def test_a_processor_that_cannot_run_is_a_problem(manage: Manage, install: Install) -> None:
    install(
        "odd",
        """
        @batch_processor(pending=lambda: Parcel.objects.all()[:3], done={"sent": True})
        def first_three(parcel): ...
        """,
    )
    found = doctor(manage, "odd.first_three")
    assert (found.code, found.level("options")) == (1, "problem")
    assert "got a slice" in found.what("options")


# --- the command


def test_each_finding_is_one_line(manage: Manage) -> None:
    done = manage("doctor", DELIVER)
    levels = [line.partition(": ")[0] for line in done.out.splitlines()]
    assert {*levels} <= {str(level) for level in Level}
    assert len(levels) == 4
    assert done.err.endswith(" of 4 findings need attention.\n")
    assert "ok: router, warehouse.weigh: " in manage("doctor").out  # without a name: all


def test_nothing_is_locked_or_written(manage: Manage, role: str) -> None:
    """Neither can be done by a session that is read-only."""
    parcels(3)
    execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    for name in ("deliver", "weigh", "gather", "fetch"):
        assert manage("explain", f"warehouse.{name}", "--using", "other").code == 0
        found = doctor(manage, f"warehouse.{name}", "--using", "other").found
        assert {*found} >= {"snapshot", "router"}
