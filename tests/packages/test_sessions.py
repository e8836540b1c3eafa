"""What a project sets for its sessions, or puts around its cursors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from dcl_processor.database.sight import sight
from dcl_processor.exceptions import Unsupported
from dcl_processor.processes import pool
from dcl_processor.processes.graceful_stop import Stop
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import beat_soon
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CREATE = (
    "CREATE ROLE tests_clerk LOGIN; GRANT SELECT, UPDATE ON tests_errand TO tests_clerk; "
    "CREATE FUNCTION tests_asked() RETURNS text LANGUAGE plpgsql STABLE AS "
    "'BEGIN RETURN CURRENT_SETTING (''user.tenant'', true); END'; "
    "CREATE FUNCTION tests_tenant() RETURNS text LANGUAGE sql STABLE AS 'SELECT tests_asked()'; "
    "CREATE FUNCTION tests_audit() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN NEW.result = current_setting (''user.audit''); RETURN NEW; END'; "
    "ALTER TABLE tests_errand ENABLE ROW LEVEL SECURITY; "
    "CREATE POLICY tests_mine ON tests_errand USING (result = "
)
DROP = (
    "DROP POLICY tests_mine ON tests_errand; DROP FUNCTION tests_tenant, tests_asked, tests_audit; "
    "ALTER TABLE tests_errand DISABLE ROW LEVEL SECURITY; "
    "DROP OWNED BY tests_clerk; DROP ROLE tests_clerk"
)
#: The value that a policy compares, whose session it is, and the setting that lets it see rows.
SECURED = {
    "variable": ("current_setting('user.tenant', true)", "tests_clerk", "user.tenant", "7"),
    "function": ("tests_tenant()", "tests_clerk", "user.tenant", "7"),
    "role": ("'7'", "postgres", "role", "tests_clerk"),
}


@pytest.fixture(params=SECURED.values(), ids=[*SECURED])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the session of "other" alone see three of six rows; give the setting's name."""
    the.errands(3, result="7")
    the.errands(3, result="8")
    compared, user, *setting = request.param
    other = connections["other"]
    other.close()
    monkeypatch.setitem(connections.databases["other"], "USER", user)
    with temporary(f"{CREATE}{compared})", DROP):
        with other.cursor() as cursor:
            cursor.execute("SELECT set_config(%s, %s, false)", setting)
        yield setting[0]
        other.close()


def test_leases_are_renewed_where_only_the_runs_session_was_to_see_the_rows(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_soon(monkeypatch)

    def handle(row: Errand) -> None:
        mine = Errand.objects.filter(pk=row.pk, result="7")
        first = mine.values_list("leased_until", flat=True).get()
        until(mine.filter(leased_until__gt=first).exists, "a renewal")

    assert_run(the.at_least_once(handle).run(using="other"), processed=3)


def test_asynchronous_handlers_see_what_the_runs_session_sees(setting: str) -> None:
    seen: list[int] = []

    async def handle(row: Errand) -> None:
        seen.append(await Errand.objects.using("other").acount())

    assert_run(the.at_most_once(handle, concurrency=3).run(using="other"), processed=3)
    assert seen == [3, 3, 3]


def test_threads_see_what_the_runs_session_sees_and_workers_are_refused(setting: str) -> None:
    run: Any = the.transactional(the.ignore)
    refused = f"expected workers to see .*, got other values of {setting}; set"
    with pytest.raises(Unsupported, match=refused):
        pool.run(run, workers=2, stop=Stop(), using="other")
    assert_run(run(using="other", concurrency=3), processed=3)


@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_handler_that_chooses_other_rows_loses_no_flip(
    make: the.Make, batch_size: int, is_local: bool, setting: str
) -> None:
    """Also until the end of a transaction, and so of the one that is around it."""

    def handle(row: Errand) -> None:
        with transaction.atomic(using="other"), connections["other"].cursor() as cursor:
            other = "none" if setting == "role" else "8"
            cursor.execute("SELECT set_config(%s, %s, %s)", [setting, other, is_local])

    assert_run(make(handle, batch_size=batch_size).run(using="other"), processed=3)
    assert {*Errand.objects.filter(done=True).values_list("result", flat=True)} == {"7"}
    assert Errand.objects.filter(done=True).count() == 3


@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_handler_that_chooses_another_schema_touches_none_of_its_rows(
    make: the.Make, batch_size: int
) -> None:
    """The rows there have the same keys."""
    the.errands(6)

    def handle(row: Errand) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET search_path = public")

    with temporary(
        "CREATE SCHEMA tests_tenant; CREATE TABLE tests_tenant.tests_errand "
        "(LIKE public.tests_errand INCLUDING ALL); INSERT INTO tests_tenant.tests_errand "
        "SELECT * FROM tests_errand; SET search_path = tests_tenant, public",
        "SET search_path = DEFAULT; DROP SCHEMA tests_tenant CASCADE",
    ):
        assert_run(make(handle, batch_size=batch_size)(), processed=6)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM public.tests_errand WHERE done")
            assert cursor.fetchone() == (0,)


def test_what_a_trigger_alone_asks_for_hides_no_row(setting: str) -> None:
    """An audit has a value of its own in each session."""
    assert "user.audit" not in sight(connections["other"])


@the.all_deliveries
def test_a_wrapper_and_captured_queries_see_each_flip(make: the.Make) -> None:
    the.errands(3)
    wrapped: list[str] = []

    def look(execute: Any, sql: str, *arguments: Any) -> Any:
        wrapped.append(sql)
        return execute(sql, *arguments)

    with connection.execute_wrapper(look), CaptureQueriesContext(connection) as captured:
        assert_run(make(the.ignore)(), processed=3)
    for seen in (wrapped, [each["sql"] for each in captured]):
        assert "".join(seen).count('"done" = ') == 3 + 1  # and the rehearsal


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the driver of "other" prepare each statement."""
    other = connections["other"]
    for name, value in {"server_side_binding": True, "prepare_threshold": 0}.items():
        monkeypatch.setitem(other.settings_dict["OPTIONS"], name, value)
    other.close()
    yield other
    other.close()


@the.all_deliveries
def test_values_may_be_bound_by_the_server(make: the.Make, bound: Any) -> None:
    the.errands(7)
    assert_run(make(the.ignore, batch_size=3).run(using="other", concurrency=2), processed=7)


@the.all_deliveries
def test_a_column_may_get_another_type_under_prepared_statements(
    make: the.Make, bound: Any
) -> None:
    change, calls = "ALTER TABLE tests_errand ALTER COLUMN result TYPE", []

    def work(errand: Errand) -> None:
        calls.append(errand.place)
        # Its lock would keep the change waiting.
        if len(calls) == 2 and not bound.in_atomic_block:
            apply("text")

    def apply(kind: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"{change} {kind}")

    the.errands(3)
    with temporary("", f"{change} varchar(50)"):
        for _ in range(2):
            assert make(work).run(using="other").processed == 3
            apply("text")
            the.errands(3)
