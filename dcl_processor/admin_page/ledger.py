"""What the page takes from the run ledger, an app of its own that may not be installed.

Without it the page has no buttons to pause and resume a processor.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcl_processor import ledger
from dcl_processor.exceptions import InvalidOption
from dcl_processor.management.controlling import parse_until
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.time_limit import reading
from dcl_processor.oversight import has_ledger
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

#: What can be done with a processor, and what it is called on a button.
CONTROLS: Mapping[str, str] = {"pause": "Pause", "resume": "Resume"}

#: The order for all processors has no name: it is that of the ledger's ``ALL``.
ALL = ""

#: Characters of a state.
LONGEST = 500

#: Seconds that a statement may take which only reads.
READ_WITHIN = 0.9


@dataclass(frozen=True, slots=True)
class Control:
    """The state of a processor in words, and the controls that make sense now."""

    state: str
    offered: tuple[str, ...] = ()
    is_paused: bool = False


def controls(processors: Sequence[BatchProcessor[Any]]) -> dict[str, Control]:
    """Return the states of processors by name, that of ``ALL`` first; empty without the ledger."""
    if not has_ledger() or not processors:
        return {}
    from dcl_processor.ledger.models import alias  # its tables are models of an app

    try:
        with reading(alias(), READ_WITHIN):
            found = ledger.states([ALL, *processors])
    except Exception as error:  # noqa: BLE001  # the page can show the rest
        why = shown(explain(error, processors[0]), LONGEST)
        return dict.fromkeys(
            [ALL, *(each.name for each in processors)], Control(f"not known: {why}")
        )
    return {each.name: _control(each) for each in found}


def _control(state: Any) -> Control:
    if state.pause is not None:
        # Below the pause of all, a processor may have one of its own.
        offered = ("pause", "resume") if state.pause.of_all and state.name else ("resume",)
        return Control(shown(state.sentence, LONGEST), offered, is_paused=True)
    if state.name == ALL:
        return Control("no pause of all at once", ("pause",))
    return Control(state.phase, ("pause",))


def act(
    subject: BatchProcessor[Any] | str, wanted: str, *, by: str, reason: str, until: str = ""
) -> bool:
    """Do one of ``CONTROLS``, and return whether it changed something.

    ``subject``: a processor, or ``ALL``; ``reason``, ``until``: of a pause, as in the command.
    """
    # Of two at once the second changes nothing.
    if wanted == "resume":
        return ledger.resume(subject)
    try:
        end = parse_until(until) if until else None
    except ArgumentTypeError as error:
        raise InvalidOption(f"{error}.") from error
    return ledger.pause(subject, by=by, reason=reason, until=end)
