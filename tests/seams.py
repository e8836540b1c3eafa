"""Where tests replace a part of the package, to see that a test finds what is wrong then.

All of the package's internals that such variants replace are named here: a change that moves one of
them changes this file, and no variant. A name that is gone is an error, not a variant without a
fault.
"""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor.pending import question
from dcl_processor.sql import messages, session, statements
from dcl_processor.testing import racing

#: An object, and the name of an attribute that is replaced.
Seam = tuple[Any, str]

IS_OWN_TABLE: Seam = (question, "is_own_table")
LOCK: Seam = (statements, "LOCK")
SUITS: Seam = (messages, "suits")
SEND_TOGETHER: Seam = (messages, "send_together")
IS_OBSERVED: Seam = (messages, "is_observed")
SUITS: Seam = (messages, "suits")
AMONG: Seam = (question.Question, "among")
LOCKING: Seam = (session, "locking")
RACE_TIMEOUT: Seam = (racing, "TIMEOUT")


def replace(patch: pytest.MonkeyPatch, seam: Seam, value: Any) -> None:
    """Replace the attribute for as long as the patch lasts."""
    patch.setattr(*seam, value)
