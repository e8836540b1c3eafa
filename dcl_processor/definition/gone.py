"""Names that are no options, and what to write instead of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dcl_processor.exceptions import InvalidOption

#: Options and hooks that a processor does not have, as keywords and in classes.
OF_A_PROCESSOR: dict[str, str] = {
    "breaker": "leave it out: rows back off by retry, and a run ends when everything fails",
    "lock_related": "leave it out; code that has to keep workers out of a key calls lock_key()",
    "repeats": "let pending compare a time column with Now(), and done move that time",
    "strict_order": "leave it out: an order_by() of pending holds over the whole backlog",
    "taken_over": "add a Retry, and look at row.attempts > 1 in the handler",
    "throttle": "set a rate, or wait in the handler",
}

#: Parameters that ``Retry`` does not have.
OF_A_RETRY: dict[str, str] = {
    "on_failure": "leave it out: attempts above 0 show that a row has failed"
}

#: What other task queues and Django call an option. A class may use these names for its own.
OF_OTHERS: dict[str, str] = {
    "max_retries": "write retry=Retry(max_attempts=…), which counts the first call as well",
    "order_by": "order the queryset of pending: pending=….order_by(…)",
    "queryset": "write pending=…",
}


def refuse(owner: str, given: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ``InvalidOption``, with what to write instead, for a name that is in the table."""
    for name in given:
        if name in table:
            raise InvalidOption(f"{owner} has no option {name!r}; {table[name]}.")
