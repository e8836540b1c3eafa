"""The delivery guarantees of a processor."""

from __future__ import annotations

from enum import StrEnum


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
