"""The kinds of guarantee that a processor can give."""

from __future__ import annotations

from enum import StrEnum


class Delivery(StrEnum):
    """What a crash does to a row.

    ``TRANSACTIONAL``: lock and ask again → work → flip → commit. Work in the same database
    happens exactly once; an effect outside it, such as an e-mail, may be repeated when the
    process dies between the effect and the commit.

    ``AT_MOST_ONCE``: lock and ask again → claim or flip → commit → work. Nothing is repeated; a
    row whose process died is left claimed, for a person to look at.

    ``AT_LEAST_ONCE``: lock and ask again → lease → commit → work → flip if the lease is still
    ours. A row whose process died is taken over by another copy when its lease has lapsed.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
