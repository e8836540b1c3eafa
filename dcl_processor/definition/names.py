"""The names that a definition may set, and names that are probably misspellings of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from dcl_processor.exceptions import InvalidOption

#: What the user writes as functions.
HOOKS = (
    "pending",
    "process",
    "process_batch",
    "resource",
    "taken_over",
    "throttle",
    "get_done",
    "get_failed",
)

#: Parameters of one run, which belong in its call.
PARAMETERS = ("filter", "limit", "timeout", "wait_for_locked", "stop")

#: Up to this many letters, one letter more, less or moved makes another word, not a misspelling.
SHORT = 5

#: From this many letters on, a name of several words is compared as a whole.
LONG = 8


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
    return next((each for each in known if _is_slip(name, each)), None)


def _is_slip(name: str, meant: str) -> bool:
    """Return whether the name is the meant one with a typing error in it."""
    words, others = name.split("_"), meant.split("_")
    if len(words) == len(others):
        differing = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
        if len(differing) == 1 and _is_slip_in_word(*differing[0]):
            return True
    one, other = "".join(words).lower(), "".join(others)
    if one == other:
        return True
    return len(other) >= LONG and not other.startswith(one) and _is_slip_in_word(one, other)


def _is_slip_in_word(word: str, meant: str) -> bool:
    word = word.lower()
    if word == meant:
        return True
    # Not typing errors: "names" for "name", "processed" for "process", and "entry" for "retry".
    if word.startswith(meant) or not word or word[0] != meant[0]:
        return False
    if word in _one_letter_more_or_less(meant) or sorted(word) == sorted(meant):
        return True
    if len(meant) <= SHORT:
        return False
    return difflib.SequenceMatcher(None, word, meant).ratio() >= 0.85


def _one_letter_more_or_less(word: str) -> Collection[str]:
    less = {word[:place] + word[place + 1 :] for place in range(len(word))}
    # Only doubled letters, as typing errors are: any other letter may make another word.
    more = {word[:place] + letter + word[place:] for place, letter in enumerate(word)}
    return less | more
