"""What a project sets for its sessions, or puts around its cursors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from django.db import connections

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
    "CREATE FUNCTION tests_tenant() RETURNS text LANGUAGE plpgsql STABLE AS "
    "'BEGIN RETURN current_setting(''user.tenant'', true); END'; "
    "ALTER TABLE tests_errand ENABLE ROW LEVEL SECURITY; "
    "CREATE POLICY tests_mine ON tests_errand USING ({policy})"
)
DROP = (
    "DROP POLICY tests_mine ON tests_errand; DROP FUNCTION tests_tenant; "
    "ALTER TABLE tests_errand DISABLE ROW LEVEL SECURITY; "
    "DROP OWNED BY tests_clerk; DROP ROLE tests_clerk"
)


class Secured(NamedTuple):
    """Row-level security, what a session has set for it, and the setting's name."""

    policy: str
    user: str
    choose: str
    name: str


TENANT = "SELECT set_config('user.tenant', '7', false)"
SECURED = {
    "variable": Secured(
        "result = current_setting('user.tenant', true)", "tests_clerk", TENANT, "user.tenant"
    ),
    "function": Secured("result = tests_tenant()", "tests_clerk", TENANT, "user.tenant"),
    "role": Secured("result = '7'", "postgres", "SET ROLE tests_clerk", "role"),
}


@pytest.fixture(params=SECURED.values(), ids=SECURED)
def secured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    """Let the session of "other" alone see three of six rows."""
    the.errands(3, result="7")
    the.errands(3, result="8")
    policy: Secured = request.param
    other = connections["other"]
    other.close()
    monkeypatch.setitem(connections.databases["other"], "USER", policy.user)
    with temporary(CREATE.format(policy=policy.policy), DROP):
        with other.cursor() as cursor:
            cursor.execute(policy.choose)
        yield policy
        other.close()


def done() -> set[str]:
    return {*Errand.objects.filter(done=True).values_list("result", flat=True)}


def test_leases_are_renewed_where_only_the_runs_session_was_to_see_the_rows(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_soon(monkeypatch)

    def handle(row: Errand) -> None:
        mine = Errand.objects.filter(pk=row.pk)
        first = mine.values_list("leased_until", flat=True).get()
        until(mine.filter(leased_until__gt=first).exists, "a renewal")

    assert_run(the.at_least_once(handle).run(using="other"), processed=3)
    assert done() == {"7"}


def test_asynchronous_handlers_see_what_the_runs_session_sees(secured: Secured) -> None:
    seen: list[int] = []

    async def handle(row: Errand) -> None:
        seen.append(await Errand.objects.using("other").acount())

    assert_run(the.at_most_once(handle, concurrency=3).run(using="other"), processed=3)
    assert seen == [3, 3, 3]


def test_threads_and_workers_that_would_see_other_rows_are_refused(secured: Secured) -> None:
    run: Any = the.transactional(the.ignore)
    other_values = f" to see .*, got other values of {secured.name}; set"
    with pytest.raises(Unsupported, match="expected the connections of all threads" + other_values):
        run(using="other", concurrency=3)
    with pytest.raises(Unsupported, match="expected workers" + other_values):
        pool.run(run, workers=2, stop=Stop(), using="other")
    assert done() == set()
