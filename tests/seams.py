"""Where tests replace a part of the package, to see that a test finds what is wrong then.

All of the package's internals that such variants replace are named here: a change that moves one of
them changes this file, and no variant. A name that is gone is an error, not a variant without a
fault.
"""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor.candidates import question
from dcl_processor.engine import claim, key_claim, lane, session, settling
from dcl_processor.engine.heartbeat import Heartbeat
from dcl_processor.settlement import outcome_values, writing

#: Objects, each with the name of an attribute that is replaced.
Seam = tuple[tuple[Any, str], ...]

# The question
IS_OWN_TABLE: Seam = ((question, "is_own_table"),)
NARROWED: Seam = ((question.Question, "narrowed"),)
# The claim
TRANSACTION_ID: Seam = ((claim, "has_id"),)
LOCK_CLAUSE: Seam = ((claim, "lock_clause"),)
KEY_LOCK: Seam = ((key_claim, "_locking"),)
REAP: Seam = ((key_claim, "_reap"),)
IS_FIRST: Seam = ((key_claim, "_is_first"),)
IS_WRITTEN: Seam = ((settling, "is_written"),)
SEND_TOGETHER: Seam = ((session, "send_together"),)
IS_OBSERVED: Seam = ((session, "is_observed"),)
# The work
LET_GO: Seam = ((Heartbeat, "let_go"),)
# The flip, and what is written after a failure
FLIP: Seam = ((outcome_values, "flip"),)
FIXED_FLIP: Seam = ((lane, "fixed_flip"),)
CLEARED_RETRY: Seam = ((outcome_values, "with_cleared_retry"),)
WRITE: Seam = ((writing, "compare_and_set"),)
STATEMENT: Seam = ((writing, "statement_if_free"),)
# The order of them
DELIVERIES: Seam = ((lane, "DELIVERIES"),)


def replace(patch: pytest.MonkeyPatch, seam: Seam, value: Any) -> None:
    """Replace each attribute of the seam for as long as the patch lasts."""
    for owner, name in seam:
        patch.setattr(owner, name, value)
