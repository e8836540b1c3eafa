"""Models whose rows one flip cannot settle are refused by name, and no handler's work is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import pytest
from django.db import models
from django.test.utils import isolate_apps

from dcl_processor import batch_processor
from dcl_processor.checks import check_found
from dcl_processor.exceptions import InvalidDone, Unsupported
from dcl_processor.registry import Found
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# --- a field whose values have a second column, as an amount of money has its currency


class Money(int):
    """An amount with its currency."""

    currency: str

    def __new__(cls, amount: int, currency: str) -> Self:
        self = super().__new__(cls, amount)
        self.currency = currency
        return self


class OfTwoColumns:
    """Sets the column of the currency, as the field of the amount is set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, row: Any, owner: Any = None) -> Any:
        return self if row is None else Money(vars(row)[self.name], row.currency)

    def __set__(self, row: Any, value: Any) -> None:
        vars(row)[self.name] = value
        if isinstance(value, Money):
            row.currency = value.currency


class MoneyField(models.IntegerField):  # type: ignore[type-arg]  # no generic at run time
    def contribute_to_class(self, cls: Any, name: str, private_only: bool = False) -> None:
        super().contribute_to_class(cls, name, private_only=private_only)
        setattr(cls, name, OfTwoColumns(name))


@pytest.fixture
def paid() -> Iterator[Any]:
    """Give a model of the errands' table that has a price."""
    with isolate_apps("tests"):

        class Paid(models.Model):
            done = models.BooleanField(default=False)
            claimed = models.BooleanField(default=False)
            claimed_at = models.DateTimeField(null=True)
            leased_until = models.DateTimeField(null=True)
            price = MoneyField(db_column="place")
            currency = models.CharField(max_length=50, db_column="result")

            class Meta:
                app_label = "tests"
                managed = False
                db_table = "tests_errand"

        yield Paid


def ten_euros(**others: Any) -> dict[str, Any]:
    return {"done": True, "price": Money(10, "EUR"), **others}


WORDS = r"expected done to name currency beside price, whose value sets both columns, got price al"


@the.all_deliveries
def test_a_value_of_two_columns_is_refused_unless_both_are_named(make: Any, paid: Any) -> None:
    """Otherwise the amount would be written, and the currency would not."""
    the.errands(1)
    calls: list[Any] = []
    pending = paid.objects.filter(done=False, claimed=False)
    run = make(lambda row: calls.append(row.pk), pending=pending, done=ten_euros())
    [message] = [e for e in check_found([Found(run, "tests.run")]) if e.id != "dcl_processor.W004"]
    assert message.id == "dcl_processor.E002"
    with pytest.raises(InvalidDone, match=WORDS):
        run()
    assert calls == []
    assert Errand.objects.filter(done=False, claimed=False, place=0, result="").count() == 1
    run = make(lambda row: calls.append(row.pk), pending=pending, done=ten_euros(currency="EUR"))
    assert_run(run(), processed=1)
    assert Errand.objects.filter(done=True, place=10, result="EUR").count() == len(calls) == 1


def test_a_function_is_refused_for_the_row_that_it_gives_such_a_value(paid: Any) -> None:
    the.errands(1)
    pending = paid.objects.filter(done=False)
    run = batch_processor(pending=pending, done=lambda row: ten_euros())(the.ignore)
    report = run()
    assert_run(report, failed=1)
    with pytest.raises(InvalidDone, match=WORDS):
        raise report.failures[0].error
    assert Errand.objects.filter(done=False, place=0, result="").count() == 1


# --- a key that several rows have


@contextmanager
def twins_of(*, is_managed: bool) -> Iterator[Any]:
    """Give a model of the errands' table whose key is a column that is not unique."""
    with isolate_apps("tests"):

        class Twin(models.Model):
            place = models.IntegerField(primary_key=True)
            done = models.BooleanField(default=False)
            claimed = models.BooleanField(default=False)
            claimed_at = models.DateTimeField(null=True)
            leased_until = models.DateTimeField(null=True)
            result = models.CharField(max_length=50, default="")

            class Meta:
                app_label = "tests"
                managed = is_managed
                db_table = "tests_errand"

        yield Twin


@pytest.fixture
def twins() -> Iterator[Any]:
    with twins_of(is_managed=False) as model:
        yield model


NOT_UNIQUE = r"expected one row for each key, got an update of row 0 that wrote to more"


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 10])
def test_a_key_of_several_rows_is_refused(make: Any, twins: Any, size: int) -> None:
    """Otherwise one handler would be called, and three rows would be done."""
    Errand.objects.bulk_create([Errand(place=0) for _ in range(3)])
    calls: list[Any] = []
    pending = twins.objects.filter(done=False, claimed=False)
    run = make(lambda row: calls.append(row.pk), pending=pending, batch_size=size)
    with pytest.raises(Unsupported, match=NOT_UNIQUE):
        run()
    assert calls == []
    untouched = Errand.objects.filter(done=False, claimed=False, claimed_at=None, leased_until=None)
    assert untouched.count() == 3


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 10])
def test_a_later_key_of_several_rows_flips_none_of_them(make: Any, twins: Any, size: int) -> None:
    """Also if all but one of them are done already, so that a claim locks one row."""
    Errand.objects.create(place=1)
    Errand.objects.create(place=2)
    Errand.objects.bulk_create([Errand(place=2, result="old", claimed=True) for _ in range(2)])
    pending = twins.objects.filter(done=False, claimed=False)
    run = make(the.ignore, pending=pending, batch_size=size, done={"done": True, "result": "new"})
    with suppress(Unsupported):  # which ends a run whose mark was refused
        assert_run(run(), processed=1, failed=1)
    assert Errand.objects.filter(place=2, done=False).count() == 3
    assert (
        Errand.objects.filter(place=2, claimed=True, result="old", leased_until=None).count() == 2
    )


@pytest.mark.parametrize("size", [1, 10])
def test_the_message_with_the_commit_flips_no_key_of_several_rows(size: int) -> None:
    """There the database itself compares how many rows were written."""
    with twins_of(is_managed=True) as twins:
        Errand.objects.create(place=1)
        Errand.objects.bulk_create([Errand(place=2, claimed=bool(more)) for more in range(3)])
        pending = twins.objects.filter(done=False, claimed=False)
        report = the.transactional(the.ignore, pending=pending, batch_size=size)()
        assert_run(report, processed=1, failed=1)
        with pytest.raises(Unsupported, match="an update of row 2 that wrote to more"):
            raise report.failures[0].error
    assert sorted(Errand.objects.filter(done=True).values_list("place", flat=True)) == [1]
