"""The names that a definition may set, and those that are probably misspellings of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from dcl_processor.core.report.exceptions import InvalidOption

#: What the user writes as functions.
HOOKS = ("pending", "process", "process_batch", "resource", "get_done", "get_failed")

#: Parameters of one run, which belong in its call.
PARAMETERS = ("filter", "limit", "timeout", "wait_for_locked", "stop")

#: How alike a name and the one that was meant are, by difflib's ratio.
LEAST_ALIKE = 0.87


def check_options(cls: type, options: Collection[str], given: Iterable[str]) -> None:
    """Refuse given options that override nothing, by the rule of Django's ``View.as_view()``."""
    allowed = _allowed(cls, options)
    for name in given:
        if name in allowed:
            continue
        if name in PARAMETERS:
            guess = f"it is a parameter of a run: {cls.__name__}(…).run({name}=…)."
        elif close := difflib.get_close_matches(name, allowed, n=1):
            guess = f"did you mean {close[0]!r}?"
        else:
            guess = f"the options are {', '.join(allowed)}."
        raise InvalidOption(f"{cls.__name__} has no option {name!r}; {guess}")


def check_class(cls: type, options: Collection[str]) -> None:
    """Refuse attributes of a class that look like a misspelled option.

    Helpers and constants are the user's own, and may have any name: only a name that differs from
    an option or a hook by a typing error is refused.
    """
    for name, value in vars(cls).items():
        own = name.startswith("_") or name.isupper() or isinstance(value, type)
        if own or any(hasattr(base, name) for base in cls.__mro__[1:]):
            continue
        is_code = callable(value) or hasattr(value, "__get__")
        meant = _meant(name, HOOKS if is_code else (*options, *HOOKS))
        if meant is not None:
            raise InvalidOption(
                f"{cls.__name__} has no option {name!r}; did you mean {meant!r}? If {name!r} is "
                "an attribute of your own, begin its name with an underscore."
            )


def _allowed(cls: type, options: Collection[str]) -> list[str]:
    """Return the options, the hooks, and the other attributes of the user's own classes."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("dcl_processor.")]
    inherited = {name for base in ours for name in vars(base)}
    own = {name for name in dir(cls) if not name.startswith("_")} - inherited
    return sorted({*options, *HOOKS, *own})


def _meant(name: str, known: Iterable[str]) -> str | None:
    """Return which known name this is with a typing error; "names", "get_one" are other words."""
    spelled = name.lower()
    alike = [each for each in known if spelled == each or not spelled.startswith(each)]
    close = difflib.get_close_matches(spelled, alike, n=1, cutoff=LEAST_ALIKE)
    return next((each for each in close if _words_begin_alike(each, spelled)), None)


def _words_begin_alike(one: str, other: str) -> bool:
    """Return whether each word has the same first letter, or only the underscores differ."""
    first, second = ([word[:1] for word in each.split("_")] for each in (one, other))
    return first == second or one.replace("_", "") == other.replace("_", "")
