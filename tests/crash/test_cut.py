"""The connection is lost during a statement, and the client does not know if it took effect."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.db import connection

from dcl_processor import BatchProcessor, batch_processor
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.crash import processors
from tests.crash.audit import effects
from tests.crash.proxy import cut
from tests.crash.rows import FIRST, SECOND, THIRD, fresh, rows, those, time_passes, work
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.parametrize("forwarded", [True, False], ids=["answer-lost", "request-lost"]),
]

BOTH = Counter([FIRST, SECOND])


@pytest.fixture(autouse=True)
def _two_rows(audit: str) -> None:
    fresh(FIRST, SECOND)


#: Only PostgreSQL can be asked what became of a transaction.
KNOWS = connection.vendor == "postgresql"


def run_and_lose_the_first_commit(processor: BatchProcessor[Errand], forwarded: bool) -> None:
    """See that the run goes on with a new connection, and reports what became of the row."""
    # Nothing is noted in a row whose commit was made.
    retried = int(processor.retry is not None and not forwarded)
    with cut(b"COMMIT", forwarded=forwarded):
        report = processor(using="other")
    if forwarded and KNOWS:
        assert_run(report, processed=2)
        return
    assert_run(report, processed=1, failed=1, to_retry=retried)
    assert report.failures[0].pk == FIRST


def run_and_lose_the_first_claim(processor: BatchProcessor[Errand], forwarded: bool) -> None:
    """See that no handler is called for a claim without an answer, and that it is tried again."""
    with cut(b"dcl_taken" if KNOWS else b"COMMIT", forwarded=forwarded):
        report = processor(using="other")
    if forwarded:
        assert_run(report, processed=1, stale=1)
        assert effects() == Counter([SECOND])
    else:
        assert_run(report, processed=2)


def test_transactional_the_next_run_asks_again(forwarded: bool) -> None:
    run_and_lose_the_first_commit(processors.transactional, forwarded)
    assert those(lambda row: row.done) == ({FIRST, SECOND} if forwarded else {SECOND})
    assert effects() == BOTH
    assert_run(processors.transactional(), processed=0 if forwarded else 1)
    assert those(lambda row: row.done) == {FIRST, SECOND}
    assert work() == BOTH
    assert effects() == BOTH + Counter([] if forwarded else [FIRST])


def test_transactional_a_row_that_turns_out_to_be_done_is_charged_no_attempt(
    forwarded: bool,
) -> None:
    run_and_lose_the_first_commit(processors.transactional_retry, forwarded)
    assert rows()[FIRST].attempts == (0 if forwarded else 1)
    assert rows()[FIRST].done == forwarded


def test_transactional_a_batch_asks_again_row_by_row(forwarded: bool) -> None:
    with cut(b"COMMIT", forwarded=forwarded):
        report = processors.transactional_batch(using="other")
    known = KNOWS or not forwarded
    assert_run(report, processed=2 if known else 0, stale=0 if known else 2)
    assert those(lambda row: row.done) == {FIRST, SECOND}
    assert work() == BOTH
    assert effects() == (BOTH if forwarded else BOTH + BOTH)


def test_at_most_once_without_claim_the_row_may_never_be_handled(forwarded: bool) -> None:
    """That is what the delivery promises."""
    run_and_lose_the_first_claim(processors.at_most_once, forwarded)
    assert_run(processors.at_most_once())
    assert those(lambda row: row.done) == {FIRST, SECOND}
    assert effects() == Counter([SECOND] if forwarded else [FIRST, SECOND])


def test_at_most_once_the_row_is_in_doubt_and_never_repeated(forwarded: bool) -> None:
    run_and_lose_the_first_claim(processors.claim, forwarded)
    assert_run(processors.claim())
    doubtful = {rows()[FIRST]} if forwarded else set()
    assert set(processors.claim.in_doubt(older_than=0)) == doubtful
    assert effects() == Counter([SECOND] if doubtful else [FIRST, SECOND])


def test_at_least_once_the_row_is_taken_when_the_lease_has_lapsed(forwarded: bool) -> None:
    run_and_lose_the_first_claim(processors.lease, forwarded)
    # Counted with the claim, if that was made; a success clears them.
    assert rows()[FIRST].attempts == int(forwarded)
    assert_run(processors.lease())
    time_passes()
    assert_run(processors.lease(), processed=int(forwarded))
    assert rows()[FIRST].attempts == 0
    assert those(lambda row: row.done and row.leased_until is None) == {FIRST, SECOND}
    assert effects() == BOTH


# --- the settlement, which is a statement of its own


def run_and_lose_the_first_settlement(
    options: dict[str, Any], forwarded: bool
) -> BatchProcessor[Errand]:
    """See that the settlement is sent again on a new connection, safe by its expected values."""
    with cut(b"UPDATE", forwarded=forwarded, armed=False) as plan:

        @batch_processor(**options)
        def errand(row: Errand) -> None:
            processors.act(row)
            plan.armed.set()

        report = errand(using="other")
    assert_run(report, processed=2)
    assert effects() == BOTH
    assert those(lambda row: row.done) == {FIRST, SECOND}
    return errand


def test_at_most_once_a_settlement_that_is_lost_leaves_no_doubt(forwarded: bool) -> None:
    errand = run_and_lose_the_first_settlement(processors.claimed, forwarded)
    assert not errand.in_doubt(older_than=0).exists()
    assert those(lambda row: row.claimed) == set()


def test_at_least_once_a_settlement_that_is_lost_costs_nothing(forwarded: bool) -> None:
    run_and_lose_the_first_settlement(processors.leased, forwarded)
    assert those(lambda row: row.attempts or row.leased_until) == set()


# --- the message that has the last statements of one row, and the claim of the next


if SENDS_SEVERAL:

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (processors.plain, b"COMMIT"),
            (processors.claimed, b"dcl_taken"),
            (processors.leased, b"dcl_taken"),
        ],
        ids=["TRANSACTIONAL", "AT_MOST_ONCE", "AT_LEAST_ONCE"],
    )
    def test_the_report_is_right_for_the_row_of_a_message_that_is_lost(
        forwarded: bool, options: dict[str, Any], words: bytes
    ) -> None:
        """Row 2 of 4 is settled by it; under a mark row 3 is claimed by it."""
        pks = [*range(FIRST, FIRST + 4)]
        fresh(*pks)
        handled: list[int] = []
        with cut(words, forwarded=forwarded, armed=False) as plan:

            @batch_processor(**options)
            def errand(row: Errand) -> None:
                handled.append(row.pk)
                if row.pk == SECOND:
                    plan.armed.set()

            report = errand(using="other")
        if options is processors.plain:
            assert_run(report, processed=4 if forwarded else 3, failed=0 if forwarded else 1)
            assert sorted(handled) == pks
            assert those(lambda row: row.done) == {*pks} - ({*()} if forwarded else {SECOND})
            return
        # A claim that was committed without an answer has called no handler.
        unknown = {THIRD} if forwarded else set()
        assert_run(report, processed=4 - len(unknown), stale=len(unknown))
        assert sorted(handled) == sorted({*pks} - unknown)
        assert those(lambda row: row.done) == {*handled}
