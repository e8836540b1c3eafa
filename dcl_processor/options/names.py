"""The names that a definition may set, and those that are probably misspellings of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from dcl_processor.report.exceptions import InvalidOption

#: What the user writes as functions.
HOOKS = ("pending", "process", "process_batch", "resource", "get_done", "get_failed")

#: Parameters of one run, which belong in its call.
PARAMETERS = ("filter", "limit", "timeout", "wait_for_locked", "stop")

#: Options and hooks that a processor does not have, as keywords and in classes.
OF_A_PROCESSOR: dict[str, str] = {
    "breaker": "leave it out: rows back off by retry, and a run ends when everything fails",
    "lock_related": "leave it out: groups need PostgreSQL or SQLite",
    "max_workers": "write max_in_flight=…, the rows in flight over all machines",
    "repeats": "compare a time column with Now() in pending, and let done move it",
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


def check_class(cls: type) -> None:
    """Refuse attributes of a class that were options once."""
    refuse(cls, OF_A_PROCESSOR.keys() & vars(cls).keys(), OF_A_PROCESSOR)


def refuse(cls: type, given: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ``InvalidOption``, with what to write instead, for a name that is in the table."""
    for name in given:
        if name in table:
            raise InvalidOption(f"{cls.__name__} has no option {name!r}; {table[name]}.")


def check_options(cls: type, options: Collection[str], given: Iterable[str]) -> None:
    """Refuse given options that override nothing, by the rule of Django's ``View.as_view()``."""
    allowed = _allowed(cls, options)
    for name in given:
        if name in allowed:
            continue
        refuse(cls, [name], {**OF_A_PROCESSOR, **OF_OTHERS})
        if name in PARAMETERS:
            guess = f"it is a parameter of a run: {cls.__name__}(…).run({name}=…)."
        elif close := difflib.get_close_matches(name, allowed, n=1):
            guess = f"did you mean {close[0]!r}?"
        else:
            guess = f"the options are {', '.join(allowed)}."
        raise InvalidOption(f"{cls.__name__} has no option {name!r}; {guess}")


def _allowed(cls: type, options: Collection[str]) -> list[str]:
    """Return the options, the hooks, and the other attributes of the user's own classes."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("dcl_processor.")]
    inherited = {name for base in ours for name in vars(base)}
    own = {name for name in dir(cls) if not name.startswith("_")} - inherited
    return sorted({*options, *HOOKS, *own})
