"""A cache that remembers the answers of querysets by their SQL, as several packages bring one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Answer each question from memory the second time, except one that is for a write.

    Nothing is forgotten, as if each write came from another machine, or went past the ORM.
    """
    remembered = dict[Any, Any]()

    def caching(name: str) -> Callable[..., Any]:
        original = getattr(QuerySet, name)

        def remember(rows: Any, *arguments: Any) -> Any:
            if rows._for_write:
                return original(rows, *arguments)
            kind = (name, rows._iterable_class, arguments, rows._fields)
            known = (*kind, str(rows.query), rows.db)
            if name == "_fetch_all":
                if rows._result_cache is None and known in remembered:
                    rows._result_cache = [*remembered[known]]
                original(rows)
                remembered[known] = [*rows._result_cache]
                return None
            if known not in remembered:
                remembered[known] = original(rows, *arguments)
            return remembered[known]

        return remember

    for name in ("_fetch_all", "count", "exists"):
        monkeypatch.setattr(QuerySet, name, caching(name))
    return remembered


@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
@the.each_question
def test_no_claim_is_answered_by_it(make: the.Make, batch_size: int, question: Any) -> None:
    the.errands(7)
    handled: list[int] = []
    run = make(lambda row: handled.append(row.place), batch_size=batch_size, pending=question())
    assert_run(run(), processed=7)
    assert sorted(handled) == [*range(7)]
    Errand.objects.update(done=False, claimed=False, claimed_at=None)
    assert_run(run(), processed=7)
    assert sorted(handled) == sorted([*range(7)] * 2)
    assert_run(run())


def test_rows_in_doubt_are_counted_anew() -> None:
    the.errands(3)
    run = the.at_most_once(the.raising(ValueError()))
    now = timedelta(0)
    assert run.in_doubt(older_than=now).count() == 0
    assert_run(run(), failed=3)
    assert run.in_doubt(older_than=now).count() == 3
