"""The names that a definition may set, and those that are probably misspellings of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from dcl_processor.report.exceptions import InvalidOption

#: What the user writes as functions.
HOOKS = ("pending", "process", "process_batch", "resource", "get_done", "get_failed")

#: Parameters of one run, which belong in its call.
PARAMETERS = ("filter", "limit", "timeout", "wait_for_locked", "stop")

#: What other task queues and Django call an option. A class may use these names for its own.
OF_OTHERS: dict[str, str] = {
    "max_retries": "write retry=Retry(max_attempts=…), which counts the first call as well",
    "order_by": "order the queryset of pending: pending=….order_by(…)",
    "queryset": "write pending=…",
}


def check_options(cls: type, options: Collection[str], given: Iterable[str]) -> None:
    """Refuse given options that override nothing, by the rule of Django's ``View.as_view()``."""
    allowed = _allowed(cls, options)
    for name in given:
        if name in allowed:
            continue
        if name in OF_OTHERS:
            guess = f"{OF_OTHERS[name]}."
        elif name in PARAMETERS:
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
