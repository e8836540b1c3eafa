"""One message for a row: what settles it travels with the claim of the next one.

An addition to the two messages of a delivery, ``BEGIN; claim`` and ``flips; COMMIT``: a settlement
is kept until the next claim, if there is one that needs no read, and no code of the user's runs in
between. An error skips the rest of a message. What became of the settlement is then asked, by the
transaction's id, or written again, which a mark allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcl_processor.core.engine.context import Context
from dcl_processor.core.engine.failing import isolate
from dcl_processor.core.engine.rows import Batch, Row
from dcl_processor.core.report import events
from dcl_processor.core.report.outcomes import Handled
from dcl_processor.core.sql.compiled import Statement
from dcl_processor.core.sql.messages import Messages, explained, is_observed


@dataclass(slots=True, eq=False)
class Kept:
    """A settlement that was not sent yet: its statements, and what is called with their answers.

    ``again``: settles alone what was in a message that failed.
    """

    statements: Sequence[Statement]
    answered: Callable[[list[Any]], None]
    again: Callable[[Exception], None]


def may_keep(run: Context) -> bool:
    """Return whether the next claim comes at once, with no code of others in between."""
    session = run.session
    return (
        isinstance(session, Messages)
        and run.source.has_next
        and run.concurrency == 1
        and not session.connection.run_on_commit
        and not is_observed(session.connection)
        and not (events.row_finished.receivers or events.gates)
    )


def keep_flips(
    run: Context, batch: Batch, pks: Sequence[Any], statements: Sequence[Statement]
) -> None:
    """Keep the flips of rows, and the COMMIT of their transaction."""

    def answered(_: list[Any]) -> None:
        run.note_handled(pks)
        run.count(batch)

    def again(error: Exception) -> None:
        # The error may be of the claim, which comes behind the COMMIT.
        isolate(run, batch, explained(error, run.processor.name, [row.pk for row in batch.rows]))

    batch.is_kept = batch.is_committing = True
    run.kept = Kept(statements, answered, again)


def keep_settlement(
    run: Context, row: Row, outcome: Handled, statement: Statement, alone: Callable[[], None]
) -> None:
    """Keep the settlement of a row with a mark."""

    def answered(answers: list[Any]) -> None:
        if not answers[0]:
            alone()  # it finds out why nothing was written
            return
        run.source.end([row.pk])
        run.note_handled([row.pk])
        run.counters.count(row.pk, outcome)

    run.kept = Kept([statement], answered, lambda _: alone())


def settle_kept(run: Context) -> None:
    """Send alone what was kept, because no claim comes."""
    kept, run.kept = run.kept, None
    if kept is None:
        return
    try:
        answers = run.session.send_kept(kept.statements)
    except Exception as error:
        kept.again(error)
        return
    kept.answered(answers)


def with_kept(run: Context, batch: Batch, claim: Callable[[Sequence[Statement]], Any]) -> Any:
    """Claim in the message of what was kept; return what the claim returns, or ``None``.

    ``None``: the message failed, what was kept is settled alone, and the rows wait again.
    """
    kept, run.kept = run.kept, None
    if kept is None:
        return claim(())
    try:
        claimed = claim(kept.statements)
    except Exception as error:
        run.source.put_back(batch.wanted.pks)
        kept.again(error)
        return None
    kept.answered(run.session.answers_of_kept)
    return claimed
