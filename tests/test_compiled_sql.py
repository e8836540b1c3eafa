"""Statements that are compiled once: which share one, and what is written by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import django
import pytest
from django.db import connection, connections, models
from django.db.models import F, Func, Model, Value
from django.db.models.functions import Coalesce, Now, TruncDay, Upper
from django.test.utils import isolate_apps
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.compiled_sql.cache import MOST_KEPT
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.pending.question import ask
from dcl_processor.settlement import writing
from dcl_processor.settlement.writing import group
from tests.contract.support.reports import assert_run
from tests.models import Depot, Errand, Parcel, Sample

pytestmark = pytest.mark.django_db(transaction=True)


def question_of(model: type[Model]) -> Any:
    return ask(model._default_manager.all(), label="test")


PROCESSOR = batch_processor(pending=Parcel.objects.all(), done={"sent": True})(print)


def kept(question: Any) -> dict[Any, Any]:
    """Return this thread's statements, by their names."""
    known: dict[Any, Any] = question.writes._kept
    return known


def write(question: Any, row: Any, **values: Any) -> None:
    writing.write(question, [row.pk], values, PROCESSOR)
    row.refresh_from_db()


def test_a_foreign_key_is_written_from_a_row_after_it_was_written_from_a_key() -> None:
    question, row, depot = question_of(Parcel), Parcel.objects.create(), Depot.objects.create()
    for value in (None, depot, depot.pk, depot, None):
        write(question, row, depot=value)
        assert row.depot == (depot if value else None)


def test_an_expression_has_a_statement_of_its_own() -> None:
    question, row = question_of(Parcel), Parcel.objects.create(tries=1)
    more, sent = F("tries") + 1, Now()
    for expected in (2, 3):
        write(question, row, tries=more, sent_at=sent, note=str(expected))
        assert (row.tries, row.note) == (expected, str(expected))
        assert row.sent_at is not None
    assert len(kept(question)) == 1
    write(question, row, tries=F("tries") + 10, sent_at=sent, note="")
    assert row.tries == 13
    assert len(kept(question)) == 2
    write(question, row, tries=F("tries") - 10, sent_at=sent, note="")
    assert row.tries == 3


def test_usual_flips_share_a_statement_although_each_is_made_for_its_row() -> None:
    question, row = question_of(Parcel), Parcel.objects.create(tries=0)
    for tries in range(1, 4):
        more = Coalesce(F("tries"), Value(0)) + 1
        write(question, row, tries=more, sent_at=Now(), note=Value("a"), weight=F("tries") * 2)
        assert (row.tries, row.note, row.weight) == (tries, "a", 2 * (tries - 1))
    assert len(kept(question)) == 1
    assert all(kept(question).values())


class Numbered(Func):
    """Makes its parameter when it is compiled, as expressions of users do."""

    output_field = models.CharField()
    numbers = itertools.count()

    def as_sql(self, *_: Any, **__: Any) -> Any:
        return "%s", [f"number {next(self.numbers)}"]


DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {"pending": Errand.objects.filter(done=False)},
    "at most once": {
        "pending": Errand.objects.filter(done=False, claimed=False),
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
    },
    "at least once": {
        "pending": Errand.objects.filter(done=False),
        "delivery": Delivery.AT_LEAST_ONCE,
        "lease": Lease(60),
    },
}
each_delivery = pytest.mark.parametrize("options", DELIVERIES.values(), ids=[*DELIVERIES])


def results(number: int, **options: Any) -> list[str]:
    """Run over some rows; return what became of their ``result``."""
    Errand.objects.bulk_create([Errand(place=place) for place in range(number)])
    report = batch_processor(**options)(lambda row: row.place)()
    assert_run(report, processed=number)
    return list(Errand.objects.order_by("place").values_list("result", flat=True))


@pytest.mark.parametrize("value", [Numbered(), Coalesce(Numbered(), Value(""))], ids=repr)
@each_delivery
def test_parameters_are_made_for_each_row_that_are_made_when_compiled(
    options: dict[str, Any], value: Any
) -> None:
    written = results(6, done={"done": True, "result": value}, **options)
    assert len(set(written)) == 6


@each_delivery
def test_a_time_zone_that_is_active_is_each_rows_own(options: dict[str, Any]) -> None:
    """``TruncDay`` takes it when it is compiled."""

    def flip(row: Errand, result: Any) -> dict[str, Any]:
        timezone.activate(["Asia/Tokyo", "America/New_York"][row.place % 2])
        return {"done": True, "next_attempt_at": day}

    day = TruncDay(Value(datetime(2026, 6, 1, 22, tzinfo=UTC)))
    with timezone.override(None):
        results(4, done=flip, **options)
    days = Errand.objects.order_by("place").values_list("next_attempt_at", flat=True)
    assert [each and each.day for each in days] == [2, 1, 2, 1]


@each_delivery
@pytest.mark.parametrize("size", [1, 4])
def test_a_function_may_use_its_mapping_and_its_values_again(
    options: dict[str, Any], size: int
) -> None:
    value = Value("")
    flip = {"done": True, "result": value}

    def again(row: Errand, result: int) -> dict[str, Any]:
        value.value = str(result)
        flip["attempts"] = 10 + result
        return flip

    assert results(6, done=again, batch_size=size, **options) == list("012345")
    attempts = Errand.objects.order_by("place").values_list("attempts", flat=True)
    assert list(attempts) == [10, 11, 12, 13, 14, 15]


def test_a_value_that_holds_what_may_change_is_compiled_for_each_row() -> None:
    question, row = question_of(Sample), Sample.objects.create()
    document = Value({"a": 1}, output_field=models.JSONField())
    for number in (1, 2):
        document.value["a"] = number
        write(question, row, data=document)
        assert row.data == {"a": number}
    assert kept(question) == {}


def test_delays_share_a_statement_and_each_is_its_own() -> None:
    question = question_of(Errand)
    row: Any = Errand.objects.create()
    for seconds in (60, 0.25, 86_400):
        delay = timedelta(seconds=seconds)
        write(question, row, next_attempt_at=Later(delay), attempts=1)
        mine = row.next_attempt_at
        # What Django makes of the same sum, in a statement of its own.
        row.next_attempt_at = DatabaseNow() + delay
        row.save(update_fields=["next_attempt_at"])
        row.refresh_from_db()
        assert timedelta(0) <= row.next_attempt_at - mine < timedelta(seconds=30)
    assert len(kept(question)) == 1
    assert all(kept(question).values())


def test_statements_of_rows_with_expressions_of_their_own_are_not_kept_for_ever() -> None:
    question, row = question_of(Parcel), Parcel.objects.create()
    for number in range(2 * MOST_KEPT):
        write(question, row, tries=F("tries") + number)
        assert len(kept(question)) <= MOST_KEPT


def test_threads_share_no_statement() -> None:
    question, row = question_of(Parcel), Parcel.objects.create()
    write(question, row, note="here")

    def there() -> tuple[dict[Any, Any], int]:
        try:
            before = dict(kept(question))
            writing.write(question, [row.pk], {"note": "there"}, PROCESSOR)
            return before, len(kept(question))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(there).result(30) == ({}, 1)
    row.refresh_from_db()
    assert row.note == "there"
    assert len(kept(question)) == 1


class Scrambled(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Keeps its text backwards, and knows of nothing but text."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        return None if value is None else f"{value}"[::-1]

    def from_db_value(self, value: str | None, *_: Any) -> str | None:
        return value and value[::-1]


class Strict(Scrambled):
    """Raises for whatever is no text."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        return super().get_db_prep_save(value and value.encode().decode(), connection)


class Loud(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Makes SQL of a value, and passes an expression through."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        prepared = super().get_db_prep_save(value, connection)
        return prepared if hasattr(prepared, "as_sql") else Upper(Value(prepared))


class Raised(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Has the database make something of each value: by a placeholder, as pgcrypto's fields do."""

    if django.VERSION >= (6, 1):

        def get_placeholder_sql(self, value: Any, compiler: Any, connection: Any) -> Any:
            if hasattr(value, "as_sql"):
                return compiler.compile(value)
            return "UPPER(%s)", (value,)

    else:

        def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
            return "%s" if hasattr(value, "as_sql") else "UPPER(%s)"


@pytest.fixture
def secret() -> Iterator[type[Model]]:
    with isolate_apps("tests"):

        class Secret(models.Model):
            scrambled = Scrambled(max_length=50, null=True)
            strict = Strict(max_length=50, null=True)
            loud = Loud(max_length=50, default="")
            raised = Raised(max_length=50, default="")
            sent = models.BooleanField(default=False)

            class Meta:
                app_label = "tests"

        with connection.schema_editor() as editor:
            editor.create_model(Secret)
        try:
            yield Secret
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(Secret)


@pytest.mark.parametrize("field", ["scrambled", "strict"])
def test_a_field_that_leaves_no_place_open_gets_its_values(secret: type[Model], field: str) -> None:
    question, row = question_of(secret), secret._default_manager.create()
    for text in ("one", "two", None):
        write(question, row, **{field: text})
        assert getattr(row, field) == text
    assert list(kept(question).values()) == [None]


def test_a_field_that_makes_sql_of_a_value_gets_its_values(secret: type[Model]) -> None:
    question, row = question_of(secret), secret._default_manager.create()
    for text in ("one", "two"):
        # Django itself takes an expression from such a field when it updates.
        write(question, row, loud=text)
        assert row.loud == text.upper()  # type: ignore[attr-defined]
        assert writing.compare_and_set(question, row.pk, {"id": [row.pk]}, {"loud": "three"}) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_a_fields_placeholder_is_kept_for_every_row(secret: type[Model], size: int) -> None:
    rows = secret._default_manager
    for _ in range(5):
        rows.create()
    flip = {"sent": True, "raised": "done"}
    run: BatchProcessor[Any] = batch_processor(
        pending=rows.filter(sent=False), done=flip, batch_size=size
    )(lambda row: None)
    assert_run(run(), processed=5)
    assert set(rows.values_list("raised", flat=True)) == {"DONE"}
    question, row = question_of(secret), rows.earliest("pk")
    for text in ("one", "two"):
        assert writing.compare_and_set(question, row.pk, {"id": [row.pk]}, {"raised": text}) == 1
        row.refresh_from_db()
        assert row.raised == text.upper()  # type: ignore[attr-defined]


# --- which rows one flip statement can write


class Alike:
    """A value of the user's that looks like any other of its kind."""

    def __repr__(self) -> str:
        return "Alike()"


def test_values_that_only_look_the_same_are_written_apart() -> None:
    one, other = Alike(), Alike()
    flips = {1: {"note": one}, 2: {"note": other}, 3: {"note": one}}
    assert group(flips) == [({"note": one}, [1, 3]), ({"note": other}, [2])]


def test_values_that_only_compare_equal_are_written_apart() -> None:
    assert [pks for _, pks in group({1: {"n": 1}, 2: {"n": True}, 3: {"n": 1}})] == [[1, 3], [2]]
