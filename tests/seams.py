"""Where tests replace a part of the package, to see that a test finds what is wrong then.

All of the package's internals that such variants replace are named here: a change that moves one of
them changes this file, and no variant. A name that is gone is an error, not a variant without a
fault.
"""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor import BatchProcessor, Lease, Retry
from dcl_processor.candidates import question
from dcl_processor.delivery import (
    after_commit,
    claim_and_commit,
    compare_and_set,
    deliveries,
    one_statement,
    settle,
    settle_later,
)
from dcl_processor.delivery.batch import Context
from dcl_processor.delivery.heartbeat import Heartbeat
from dcl_processor.delivery.marks import Mark, MarkedRows, Waiting
from dcl_processor.engine import claim as engine_claim
from dcl_processor.engine import deliveries as engine_deliveries
from dcl_processor.engine import lane, marking, session, settling
from dcl_processor.engine.run import Run
from dcl_processor.execution.row_savepoint import RowSavepoint
from dcl_processor.locking import claiming, key_lock, row_transactions
from dcl_processor.locking.transaction_guard import TransactionGuard
from dcl_processor.settlement import flip

#: Objects, each with the name of an attribute that is replaced.
Seam = tuple[tuple[Any, str], ...]

# The question
IS_OWN_TABLE: Seam = ((question, "is_own_table"),)
NARROWED: Seam = ((question.Question, "narrowed"),)
# The claim
LOCKING: Seam = ((claiming, "_locking"),)
TRANSACTION_ID_IN: Seam = ((engine_claim, "_id_in"),)
LOCK_CLAUSE: Seam = ((engine_claim, "lock_clause"),)
KEY_LOCK: Seam = ((key_lock, "_lock"),)
IN_FLIGHT: Seam = ((key_lock, "_in_flight"),)
REAP: Seam = ((key_lock, "_reap"),)
HEAD: Seam = ((key_lock, "head"),)
SEND_ALL: Seam = ((row_transactions, "send_all"),)
ANSWERED: Seam = ((Waiting, "answered"),)
IS_WRITTEN: Seam = ((settling, "is_written"),)
BEGIN: Seam = ((session, "BEGIN"),)
SEND_TOGETHER: Seam = ((session, "send_together"),)
IS_OBSERVED: Seam = ((row_transactions, "is_observed"), (session, "is_observed"))
SUITS_ONE_STATEMENT: Seam = ((one_statement, "suits"),)
SHOW: Seam = ((claim_and_commit, "show"), (marking, "show"))
LEASE_MARK: Seam = ((deliveries, "lease_mark"), (engine_deliveries, "lease_mark"))
RECORD_COMMIT: Seam = ((MarkedRows, "record_commit"),)
READ_ATTEMPTS: Seam = ((lane, "read_attempts"),)
IS_LEASE: Seam = ((Mark, "is_lease"),)
LEASE_FREE: Seam = ((Lease, "free"),)
HAS_ROW: Seam = ((Heartbeat, "_has"),)
# The work
UNDO: Seam = ((RowSavepoint, "_undo"),)
CLEAR_UP: Seam = ((after_commit, "clear_up"), (settling, "clear_up"))
LET_GO: Seam = ((Heartbeat, "let_go"),)
# The flip, and what is written after a failure
NEEDS_CHECK: Seam = ((Context, "needs_check"), (Run, "needs_check"))
FLIP: Seam = ((flip, "flip"),)
FLIPS: Seam = ((flip, "flips"),)
FIXED_FLIP: Seam = ((lane, "fixed_flip"),)
CLEARED_RETRY: Seam = ((flip, "with_cleared_retry"),)
UNTRIED_VALUES: Seam = ((Retry, "untried_values"),)
GIVES_UP: Seam = ((Retry, "gives_up"),)
GET_FAILED: Seam = ((BatchProcessor, "get_failed"),)
EXPECTED: Seam = (
    (settle, "expected_of"),
    (settle_later, "expected_of"),
    (settling, "expected_of"),
)
WRITE: Seam = ((settle, "write"), (compare_and_set, "write"))
STATEMENT: Seam = ((compare_and_set, "statement"), (compare_and_set, "statement_if_free"))
SETTLING: Seam = ((compare_and_set, "settling"),)
#: Set in ``__init__()``, so the class has no such name before.
TRANSACTION_ID: Seam = ((TransactionGuard, "transaction_id"),)
# The order of them
DELIVERIES: Seam = ((lane, "DELIVERIES"),)


def replace(patch: pytest.MonkeyPatch, seam: Seam, value: Any) -> None:
    """Replace each attribute of the seam for as long as the patch lasts."""
    for owner, name in seam:
        patch.setattr(owner, name, value, raising=seam is not TRANSACTION_ID)
