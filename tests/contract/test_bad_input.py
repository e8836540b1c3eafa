"""What only the model or the database can tell is refused by name, before any handler is called."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.checks import check_found
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.operator.registry import Found
from tests.contract.support import errands as the
from tests.contract.support.sessions import connected
from tests.models import Errand, Misfit, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MOST, LEAST = Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE
CLAIMING: dict[str, Any] = {"delivery": MOST, "claim": {"claimed": True}}
BY_CLAIM: dict[str, Any] = {**CLAIMING, "claimed_at": "claimed_at"}
LEASING: dict[str, Any] = {"delivery": LEAST, "lease": Lease(30)}
MARKING: dict[str, Any] = {**BY_CLAIM, **LEASING, "reset": {"claimed": False}}


def never(row: Any, *_: Any) -> None:
    raise AssertionError("expected no handler to be called")


def errands(handler: Callable[..., Any] = never, **options: Any) -> BatchProcessor[Errand]:
    def waiting() -> Any:
        return Errand.objects.filter(done=False, claimed=False, dead=False)

    options = {"pending": waiting, "done": {"done": True}, **options}
    return batch_processor(name="errands", **options)(handler)


def misfits(**options: Any) -> BatchProcessor[Misfit]:
    return batch_processor(
        pending=lambda: Misfit.objects.filter(done=False, words=""),
        done={"done": True},
        name="errands",
        **options,
    )(never)


def leasing(field: str) -> dict[str, Any]:
    return {"delivery": LEAST, "lease": Lease(30, field=field)}


UNFIT: list[tuple[Callable[..., BatchProcessor[Any]], dict[str, Any], str, str]] = [
    (misfits, leasing("leased_until"), "E009", r"field='leased_until' .*, got no such column;"),
    (misfits, leasing("never_null"), "E009", r"got a DateTimeField that cannot be NULL; add the"),
    (misfits, leasing("day"), "E009", r"a nullable DateTimeField of tests.Misfit, got a DateFi"),
    (misfits, leasing("id"), "E009", r"nullable DateTimeField of tests.Misfit, got the primary k"),
    (errands, {"retry": Retry(attempts="tries")}, "E009", r"attempts='tries' .* no such column"),
    (errands, {"retry": Retry(attempts="result")}, "E009", r"an integer column .* a CharField"),
    (
        errands,
        {"retry": Retry(next_attempt_at="place")},
        "E009",
        r"next_attempt_at='place' to name a nullable date and time column .* IntegerField",
    ),
    (errands, {"retry": Retry(last_error="done")}, "E009", r"a text column .* got a BooleanField"),
    (
        errands,
        {**CLAIMING, "claimed_at": "place"},
        "E009",
        r"claimed_at='place' to name a nullable DateTimeField of tests.Errand, got a IntegerField",
    ),
    (errands, {**CLAIMING, "claimed_at": "since"}, "E009", r"claimed_at='since' .* no such column"),
    (errands, {"pending_since": "plaec"}, "E009", r"pending_since='plaec' .* got no such"),
    (errands, {"pending_since": "place"}, "E009", r"a DateTimeField of .* got a IntegerField"),
    (
        errands,
        {"done": {"dnoe": True}},
        "E002",
        r"done to name columns of tests.Errand, got 'dnoe'",
    ),
    (errands, {"failed": {"ded": True}}, "E002", r"failed to name columns .* got 'ded'"),
    (errands, {"reset": {"id": 1}}, "E002", r"reset to name .* 'id', which is the prim"),
    (errands, {**CLAIMING, "claim": {"taken": 1}}, "E002", r"claim to name .* 'taken'"),
]


@pytest.mark.parametrize(
    ("define", "options", "check", "words"), UNFIT, ids=[words for *_, words in UNFIT]
)
def test_columns_that_do_not_fit_are_refused_by_the_check_and_by_a_run_of_nothing(
    define: Callable[..., BatchProcessor[Any]], options: dict[str, Any], check: str, words: str
) -> None:
    processor = define(**options)
    with pytest.raises(ImproperlyConfigured, match=rf"^errands: expected .*{words}") as refused:
        processor.run()
    [message] = [
        each
        for each in check_found([Found(processor, "tests.processors.errands")])
        if each.id not in {"dcl_processor.W004", "dcl_processor.W012"}
    ]
    assert message.id == f"dcl_processor.{check}"
    assert f"errands: {message.msg}" == str(refused.value)
    assert "\n" not in message.msg


def test_a_resource_for_async_code_is_refused_to_a_plain_handler() -> None:
    @asynccontextmanager
    async def later() -> AsyncIterator[str]:
        yield "never opened"

    errand = Errand.objects.create()
    with pytest.raises(InvalidOption, match=r"got one for 'async with'; wrap"):
        errands(resource=later, **LEASING).run()
    assert the.untouched(errand)


#: What a processor has no answer to, with the reason.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: errands().requeue(Errand.objects.all()),
        r"expected reset=… for requeue\(\), got a processor without reset",
    ),
    (
        lambda: errands(**{**CLAIMING, "done": None}).mark_done(Errand.objects.all()),
        "where done=… is not a mapping, with each column of claim, got no values",
    ),
    (
        lambda: errands().discard(Errand.objects.all()),
        r"expected discard\(rows, values=\{…\}\) where failed",
    ),
    (
        lambda: errands(**CLAIMING).in_doubt(older_than=60),
        r"expected claim=… and claimed_at=… .* got a processor without both",
    ),
    (
        lambda: errands(**MARKING).in_doubt(older_than=60),
        r"expected a processor without a lease for in_doubt\(\), got Lease\(.*in_progress\(\)",
    ),
    (
        lambda: errands(**BY_CLAIM).in_doubt(older_than=-1),
        "expected older_than to be a number of seconds",
    ),
    (
        lambda: errands(**CLAIMING).in_progress(),
        r"expected claim=… and claimed_at=… for in_progress",
    ),
]


@pytest.mark.parametrize(("act", "words"), REFUSED)
def test_what_a_processor_cannot_do_is_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises((InvalidOption, Unsupported), match=words):
        act()


@pytest.mark.parametrize("method", ["requeue", "mark_done"])
@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (lambda: Errand(pk=3), "Errand"),
        (list, "list"),
        (Parcel.objects.all, "QuerySet"),
        (lambda: Errand.objects.all()[:3], "QuerySet"),
    ],
)
def test_only_rows_of_the_processors_model_are_cleared_up(
    method: str, rows: Callable[[], Any], got: str
) -> None:
    Parcel.objects.create(sent=True)
    processor = errands(**BY_CLAIM, reset={"claimed": False})
    words = rf"expected {method}\(\) to take a queryset of tests.Errand without a slice, got {got};"
    with pytest.raises(InvalidOption, match=words):
        getattr(processor, method)(rows())


if connection.vendor == "mysql":

    @pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
    def test_a_server_that_ignores_skip_locked_is_refused(
        make: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """TiDB hands the same row to two workers, and says nothing."""
        the.errands(2)
        calls: list[Any] = []
        said = vars(connections["default"])
        monkeypatch.setitem(said, "mysql_server_info", "8.0.11-TiDB-v8.5.1")
        words = "expected a database on 'default' that keeps SKIP LOCKED, got 8.0.11-TiDB-v8.5.1,"
        with connected({}), pytest.raises(Unsupported, match=words):
            make(lambda row: calls.append(row.pk))()
        assert calls == []
        assert Errand.objects.filter(done=False, claimed=False, leased_until=None).count() == 2
