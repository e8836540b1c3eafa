"""Who holds the lock on a row, as PostgreSQL's tables show it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection

from dcl_processor.insights.rows import holders
from dcl_processor.operator.states import question_of
from tests.contract.support import errands as the
from tests.contract.support.parcels import processor
from tests.contract.support.temporary import temporary
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

RUN = processor(the.ignore)


@contextmanager
def locked(parcel: Parcel) -> Iterator[int]:
    """Have another session lock a row; yield the number of its process."""
    session = connection.copy()
    options = {**connection.settings_dict["OPTIONS"], "application_name": "worker 1/2"}
    session.settings_dict = {**connection.settings_dict, "OPTIONS": options}
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            cursor.execute("BEGIN")
            cursor.execute("SELECT 1 FROM tests_parcel WHERE id = %s FOR UPDATE", [parcel.pk])
            yield pid
            cursor.execute("ROLLBACK")
    finally:
        session.close()


def found(parcel: Parcel) -> tuple[str, ...]:
    answer = holders(question_of(RUN, None), parcel.pk)
    assert answer.value is not None
    return answer.value


def test_the_session_that_has_locked_a_row_is_found_until_its_transaction_ends() -> None:
    parcel, free = Parcel.objects.create(), Parcel.objects.create()
    with locked(parcel) as pid:
        assert found(free) == ()
        (holder,) = found(parcel)
    assert holder.startswith(f"pid {pid}, worker 1/2, role ")
    assert ", idle in transaction, since " in holder
    assert holder.endswith(" FOR UPDATE")
    assert found(parcel) == ()


def test_a_role_without_rights_sees_who_it_is_and_not_what_it_does() -> None:
    parcel = Parcel.objects.create()
    # Roles are the server's, which other runs of this test use at the same time.
    looker = f"dcl_looker_{secrets.token_hex(4)}"
    role = temporary(
        f"CREATE ROLE {looker}; GRANT SELECT ON tests_parcel TO {looker}; SET ROLE {looker}",
        f"RESET ROLE; DROP OWNED BY {looker}; DROP ROLE {looker}",
    )
    with locked(parcel) as pid, role:
        (holder,) = found(parcel)
    assert holder.startswith(f"pid {pid}, worker 1/2, role ")
    assert holder.endswith(", <insufficient privilege>")
