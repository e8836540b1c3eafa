"""The parameters of a run, and where a run may be called from."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase

from dcl_processor.exceptions import InsideTransaction, InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

database = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@database
def test_limit_counts_handler_calls_those_that_fail_included() -> None:
    parcels(5)

    def handle(row: Parcel) -> None:
        if row.priority == 0:
            raise ValueError

    send = processor(handle)
    assert_run(send(limit=3), processed=2, failed=1, stopped="limit")
    assert_run(send(limit=0), stopped="limit")


@database
def test_a_limit_that_is_just_met_is_no_reason_to_say_more_is_left() -> None:
    parcels(2)
    assert_run(processor(the.ignore)(limit=2), processed=2)


@database
def test_a_transaction_on_another_alias_is_none_of_its_business() -> None:
    parcels(1)
    with transaction.atomic(using="other"):
        assert_run(processor(the.ignore)(), processed=1)


class InsideTestCase(TestCase):
    """Django's own TestCase wraps each test in a transaction, and a run works in it."""

    databases = {"default"}

    def test_a_run_works(self) -> None:
        parcels(3)
        calls: list[int] = []
        run = processor(lambda row: calls.append(row.priority))
        assert_run(run(), processed=3)
        assert calls == [0, 1, 2]
        assert_run(run())

    def test_a_block_of_ones_own_is_refused_here_too(self) -> None:
        with transaction.atomic(), pytest.raises(InsideTransaction):
            processor(the.ignore)()


@pytest.mark.django_db
@the.all_deliveries
def test_inside_testcase_a_write_that_is_refused_fails_its_row_alone(make: the.Make) -> None:
    """On PostgreSQL it breaks the transaction that the test is in."""
    the.errands(3)

    def work(errand: Errand) -> None:
        if errand.place == 1:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO tests_errand (id) VALUES (%s)", [errand.pk])

    assert_run(make(work).run(), processed=2, failed=1)


@database
def test_a_run_that_did_something_is_logged_and_an_empty_one_only_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parcels(1)
    with caplog.at_level(logging.DEBUG, logger="dcl_processor"):
        processor(the.ignore)()
        processor(the.ignore)()
    assert [(r.levelname, r.getMessage().split(" in ")[0]) for r in caplog.records] == [
        ("INFO", "tests.ignore: 1 processed"),
        ("DEBUG", "tests.ignore: nothing pending"),
    ]


@database
def test_the_log_of_failures_is_capped_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    parcels(103)

    def fail(row: Parcel) -> None:
        raise ValueError(row.priority)

    report = processor(fail, max_consecutive_failures=0)()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert_run(report, failed=103)
    assert (len(report.failures), len(errors)) == (100, 101)
    assert errors[-1] == "tests.fail: 3 more rows failed and were not logged"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"limit": -1}, r"expected limit to be a whole number of rows from 0, got -1"),
        ({"timeout": -0.5}, r"expected timeout to be a number of seconds from 0.* got -0.5"),
        ({"wait_for_locked": None}, r"expected wait_for_locked .* got None"),
        ({"stop": True}, r"expected stop to be a threading.Event, .* got True"),
        ({"using": "elsewhere"}, r"expected using .* default, other, got 'elsewhere'"),
        ({"filter": {"note": "x"}}, r"expected filter to be a Q object, got {'note': 'x'}"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_meant_are_refused(
    parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        processor(the.ignore)(**parameters)
