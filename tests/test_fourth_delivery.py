"""A delivery is added by one function and one line of rules, and keeps the same promises."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

from dcl_processor import Delivery, batch_processor
from dcl_processor.definition.kinds import RULES, Rules
from dcl_processor.engine.deliveries import DELIVERIES
from dcl_processor.exceptions import InvalidOption, Unsupported
from tests.contract.support import archive
from tests.environments import CHECKOUT, passed
from tests.models import Parcel

#: What the default delivery promises.
CONTRACT = (
    "invariants batches process_batch servers_end lost_transactions threads transaction_guard "
    "row_savepoints"
)

#: These compare columns of flipped rows, count their statements, or the bytes that Django's
#: ``delete()`` leaves to the garbage collector; archived rows are gone.
READ_THE_FLIPPED_ROW = {
    "batches": [
        "a_batch_is_one_lock_one_flip_and_no_savepoint_for_handlers_without_the_database",
        "i7_a_row_that_raises_loses_its_own_work_and_no_other_rows",
    ],
    "transaction_guard": ["a_replaced_transaction_counts_one_attempt"],
    "invariants": [
        "a_filter_across_a_relation_narrows_a_run",
        "a_row_costs_two_statements_once_the_flip_was_rehearsed",
        "i2_two_copies_handle_each_row_once",
        "i5_a_flip_that_is_right_for_one_row_and_wrong_for_another_is_found_out",
        "i8_memory_does_not_grow_with_the_backlog",
        "i5_repeats_allows_a_row_to_stay_and_handles_it_once_per_run",
    ],
    "lost_transactions": [
        "an_attempt_is_counted_although_the_session_was_ended_under_the_handler",
        "i7_a_deadlock_of_a_row_alone_is_its_failure_and_its_attempt",
    ],
    "process_batch": [
        "an_exception_in_a_rows_place_is_its_outcome_and_keeps_what_was_written",
        "an_exception_in_a_rows_place_is_the_same_when_the_batch_is_redone",
    ],
    "threads": ["it_watches_until_its_rows_are_tried"],
    "servers_end": ["a_session_that_the_server_ended_is_not_the_handlers_fault"],
    "row_savepoints": [
        "i7_a_nested_atomic_block_is_rolled_back_alone",
        "i7_a_row_that_wrote_past_django_and_is_snoozed_or_discarded_loses_that_too",
        "i7_a_row_with_retry_that_wrote_past_django_keeps_its_note_alone",
    ],
}


def test_each_delivery_has_a_function_and_rules() -> None:
    assert list(DELIVERIES) == list(RULES) == list(Delivery)


OPTIONS: dict[str, Any] = {"done": {"sent": True}, "delivery": "archive"}


def test_a_delivery_without_rules_is_refused_when_it_is_defined() -> None:
    with pytest.raises(InvalidOption, match=r"expected delivery to be one of .* got 'archive'"):
        batch_processor(pending=Parcel.objects.all(), **OPTIONS)(print)


def test_a_delivery_without_a_function_is_refused_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, "archive", Rules())
    run = batch_processor(pending=Parcel.objects.all(), **OPTIONS)(print)
    with pytest.raises(Unsupported, match=r"expected a delivery with a function, .*'archive'"):
        run()


@pytest.mark.timeout(660)  # over the subprocess's own
def test_a_fourth_delivery_takes_forty_lines_at_most_and_keeps_the_contract() -> None:
    lines = inspect.getsource(archive.archive) + inspect.getsource(archive.pytest_configure)
    assert len(lines.splitlines()) <= 40
    files = [f"tests/contract/test_{name}.py" for name in CONTRACT.split()]
    others = [
        f"--deselect=tests/contract/test_{name}.py::test_{test}"
        for name, tests in READ_THE_FLIPPED_ROW.items()
        for test in tests
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.contract.support.archive", *files]
    done = subprocess.run(
        [*command, *others, "-p", "no:cacheprovider"],
        cwd=CHECKOUT,
        env={**os.environ, "CI": ""},  # which would refuse the tests left out
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed(done.stdout) >= 200
