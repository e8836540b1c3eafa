"""The delivery guarantees of a processor, and the rules that each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .definition import Definition


class Delivery(StrEnum):
    """What a crash does to a row.

    ``TRANSACTIONAL``: lock and ask again → work → flip → commit. Work in the same database
    happens exactly once; an effect outside it, such as an e-mail, may be repeated when the
    process dies between the effect and the commit.

    ``AT_MOST_ONCE``: lock and ask again → claim or flip → commit → work. Nothing is repeated; a
    row whose process died stays claimed, for a person to look at.

    ``AT_LEAST_ONCE``: lock and ask again → lease → commit → work → flip if this worker still has
    the lease. Another worker takes over a row whose process died when its lease has lapsed.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a delivery allows and needs.

    ``options``: those of ``claim``, ``claimed_at`` and ``lease`` that it uses; any other one is
    refused, ``claim`` may be left out, and ``lease`` may not. ``in_transaction``: its handlers work
    in the transaction that has the lock, so they cannot be asynchronous, and the row of a process
    that died is as it was. ``marked_by``: the options of which the first that is given is written
    to a row before its handler is called, and takes it out of ``pending``.
    """

    options: frozenset[str] = frozenset()
    in_transaction: bool = False
    marked_by: tuple[str, ...] = ()


#: Each delivery has a line here, and a function in ``engine/deliveries.py``.
RULES: dict[str, Rules] = {
    Delivery.TRANSACTIONAL: Rules(in_transaction=True),
    Delivery.AT_MOST_ONCE: Rules(frozenset({"claim", "claimed_at"}), marked_by=("claim", "done")),
    Delivery.AT_LEAST_ONCE: Rules(frozenset({"claim", "claimed_at", "lease"})),
}


def rules_of(processor: Definition[Any]) -> Rules:
    """Return the rules of a processor's delivery."""
    return RULES[processor.delivery]
