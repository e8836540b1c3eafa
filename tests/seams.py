"""Where tests replace a part of the package, to see that a test finds what is wrong then.

All of the package's internals that such variants replace are named here: a change that moves one of
them changes this file, and no variant. A name that is gone is an error, not a variant without a
fault.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from dcl_processor import BatchProcessor
from dcl_processor.engine import deliveries, heartbeat, limits, locked, source
from dcl_processor.keys import claim as claim_of_keys
from dcl_processor.keys import turns
from dcl_processor.options.options import Identity
from dcl_processor.pending import question, scan, steady
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.sql import messages, session, statements, steps
from dcl_processor.sql.compiled import Statement

#: An object, and the name of an attribute that is replaced.
Seam = tuple[Any, str]

IS_OWN_TABLE: Seam = (question, "is_own_table")
LOCK: Seam = (statements, "LOCK")
SUITS: Seam = (messages, "suits")
SEND_TOGETHER: Seam = (messages, "send_together")
IS_OBSERVED: Seam = (messages, "is_observed")
AMONG: Seam = (question.Question, "among")
LOCKING: Seam = (session, "locking")

#: The processes' clock, and how a run waits.
CLOCK: Seam = (steady, "monotonic")
PAUSE: Seam = (limits.Limits, "pause")

#: What is random in a run.
PLACES: list[Seam] = [(scan, "secrets"), (source, "secrets")]
TURNS: Seam = (turns, "random")
AMONG_OTHERS: Seam = (source.Source, "_among_others")

#: The heartbeat's thread, what it does, and where a worker and its heartbeat meet.
THREADING: Seam = (heartbeat, "threading")
KEEP: Seam = (heartbeat.Heartbeat, "_keep")
HEART: list[Seam] = [(heartbeat.Heartbeat, name) for name in ("hold", "tokens", "let_go")]
IS_OURS: Seam = (heartbeat.Heartbeat, "is_ours")

#: What writes a flip or a settlement; what releases the savepoint of a row; a heartbeat's UPDATE.
WRITING: Seam = (messages, "writing")
WRITTEN: Seam = (messages.Messages, "_written")
RELEASE: Seam = (messages, "RELEASE")
RENEWAL: Seam = (heartbeat.Heartbeat, "_write")
#: The claim of work in the transaction, its messages, and the locks of keys.
CLAIM: Seam = (deliveries, "claim")
CLAIMED_BY: Seam = (messages.Messages, "claim")
KEY_LOCKS: Seam = (claim_of_keys, "_LOCKS")
TRY_LOCK = "pg_try_advisory_xact_lock(n)"

writing, written = statements.writing, messages.Messages._written
claimed_by = messages.Messages.claim
claim, Write, NOTHING = locked.claim, steps.Write, Statement("SELECT 1")


def replace(patch: pytest.MonkeyPatch, seam: Seam, value: Any) -> None:
    """Replace the attribute for as long as the patch lasts."""
    patch.setattr(*seam, value)


def part(seam: Seam) -> Any:
    """Return what a seam names."""
    return getattr(*seam)


def untried(processor: BatchProcessor[Any]) -> BatchProcessor[Any]:
    """Return a copy of the processor whose flips this process has not tried."""
    other = copy.copy(processor)
    other._identity = Identity()
    return other


def renew_any(heart: heartbeat.Heartbeat, rows: Any, pks: Any) -> None:
    """Renew the leases of rows, whether they have one or not."""
    rows.update(**{heart.field: DatabaseNow() + timedelta(seconds=300)})
    for token in rows.values_list(heart.field, flat=True)[:1]:
        heart._note(pks, token)


def beat(heart: heartbeat.Heartbeat) -> None:
    """Renew the leases once, unless the run has ended."""
    if not heart._stop.is_set():
        heart._renew()
