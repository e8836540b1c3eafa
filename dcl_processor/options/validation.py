"""Checks of a definition that need no model and no database."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db.models.expressions import Combinable

from dcl_processor.options import functions
from dcl_processor.options.kinds import USES, Delivery, Lease
from dcl_processor.options.model_columns import FLIPS
from dcl_processor.options.options import Definition
from dcl_processor.options.retry import Retry
from dcl_processor.report.exceptions import InvalidDone, InvalidOption, Unsupported
from dcl_processor.report.observer import Gate, Observer
from dcl_processor.report.values import (
    DAY,
    Values,
    constants_of,
    expect,
    expect_seconds,
    expect_type,
    expect_whole_number,
    is_number,
)

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

_Check = Callable[[str, Any], object]


def _a(kind: Any, words: str) -> _Check:
    return partial(expect_type, kind=kind, words=words)


def _number_of(things: str, *, least: int, fix: str = "") -> _Check:
    return partial(expect_whole_number, of=things, least=least, fix=fix)


#: Seconds. An interrupt comes up to a few milliseconds late.
SHORTEST_LIMIT = 0.05


#: Rows a second: one in a day, and more than a table of tokens can keep.
LOWEST_RATE, HIGHEST_RATE = 1 / DAY, 100_000


def _rate(named: str, value: Any) -> None:
    fits = is_number(value) and LOWEST_RATE <= value <= HIGHEST_RATE
    words = f"a number of rows per second from one a day to {HIGHEST_RATE:,}"
    expect(fits, named, words, value)


def _expect_each(named: str, value: Any, *, of: Any, words: str) -> None:
    fits = isinstance(value, list | tuple) and all(isinstance(each, of) for each in value)
    expect(fits, named, f"a list of {words}", value)


#: What each option has to be. The flips and the functions have checks of their own.
_REQUIRED: dict[str, _Check] = {
    "name": _a(str, "a string"),
    "batch_size": _number_of("rows", least=1),
    "concurrency": _number_of("handlers", least=1),
    "in_order": _a(bool, "True or False"),
    "gates": partial(_expect_each, of=Gate, words="objects with may_start() and ended()"),
    "observers": partial(_expect_each, of=Observer, words="objects with run() and row()"),
}

#: The same for the options that may be ``None``.
_OPTIONAL: dict[str, _Check] = {
    "retry": _a(Retry, "a Retry, such as Retry(max_attempts=3)"),
    "max_consecutive_failures": _number_of(
        "rows", least=0, fix="; with 0, failures do not end a run"
    ),
    "max_pending": _number_of("rows", least=1),
    "handler_timeout": partial(expect_seconds, least=SHORTEST_LIMIT, most=DAY),
    "max_in_flight": _number_of("rows in flight", least=1),
    "claimed_at": _a(str, "the name of a column"),
    "lease": _a(Lease, "a Lease, such as Lease(60)"),
    "group_by": _a(str, "the name of a column or of a forward relation"),
    "fair_by": _a(str, "the name of a column or of a forward relation"),
    "max_per_group": _number_of("rows in flight", least=1),
    "pending_since": _a((str, Combinable), "the name of a column, or an expression"),
    "rate": _rate,
    "using": _a(str, "the name of a database in DATABASES"),
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


def check(processor: Definition[Any], missing: Sequence[str]) -> None:
    """Refuse options that cannot work, in either spelling; ``missing``: methods not written."""
    if missing:
        raise InvalidOption(
            f"{processor._label}: expected the methods pending(self) and process(self, row), got "
            f"no {' and no '.join(missing)}; write the missing method."
        )
    _check_values(processor)
    functions.check(processor)
    for option in FLIPS:
        _check_flip(processor, option)
    _check_delivery(processor)
    if processor.retry is not None:
        _check_retry(processor, processor.retry)
    if processor.claim is not None:
        _check_claim(processor, processor.claim)
    else:
        _check_without_claim(processor)
    if processor.group_by is not None:
        _check_groups(processor)
    else:
        _check_without_groups(processor)


def _check_values(processor: Definition[Any]) -> None:
    named = f"{processor._label}: expected"
    deliveries = ", ".join(str(delivery) for delivery in USES)
    known = processor.delivery in list(USES)  # a list, because what is given may have no hash()
    expect(known, f"{named} delivery", f"one of {deliveries}", processor.delivery)
    for option, check_value in {**_REQUIRED, **_OPTIONAL}.items():
        value = getattr(processor, option)
        if value is not None or option in _REQUIRED:
            check_value(f"{named} {option}", value)
    name = processor.name
    expect(name and name == name.strip(), f"{named} name", "a text without spaces around it", name)


def _check_flip(processor: Definition[Any], option: str) -> None:
    flip: Any = getattr(processor, option)
    if flip is None:
        return
    if not isinstance(flip, Mapping) or not all(isinstance(name, str) for name in flip):
        raise InvalidDone(
            f"{processor._label}: expected {option} to be a mapping of column names to values, "
            f"such as {{'sent': True}}, got {flip!r}."
        )
    if not flip:
        leave = " when the handler itself takes the row out of pending" if option == "done" else ""
        raise InvalidDone(
            f"{processor._label}: expected {option} to name at least one column, got {{}}; leave "
            f"it out{leave}."
        )


#: The sentence about handlers that would share a transaction.
NO_CONCURRENCY = (
    "concurrency=1 with TRANSACTIONAL, whose handlers work in the transaction of the run, got {}; "
    "start more workers, or choose AT_LEAST_ONCE or AT_MOST_ONCE"
)


# --- options that are right alone, but not together


def _check_delivery(processor: Definition[Any]) -> None:
    uses, delivery = USES[processor.delivery], str(processor.delivery).upper()
    is_at_most_once = processor.delivery == Delivery.AT_MOST_ONCE
    if is_at_most_once and processor._handles_batches:
        raise Unsupported(
            f"{processor._label}: expected process() with AT_MOST_ONCE, got process_batch(), whose "
            "error would leave all rows of a batch in doubt; write process(), or choose another "
            "delivery."
        )
    if processor.is_transactional and processor.concurrency > 1:
        raise Unsupported(
            f"{processor._label}: expected {NO_CONCURRENCY.format(processor.concurrency)}."
        )
    if is_at_most_once and processor.max_in_flight is not None:
        raise Unsupported(
            f"{processor._label}: expected no max_in_flight with AT_MOST_ONCE, whose rows in doubt "
            f"would use it up, got {processor.max_in_flight}; leave it out."
        )
    for option in sorted(frozenset().union(*USES.values()) - uses):
        value = getattr(processor, option)
        if value is not None:
            raise InvalidOption(
                f"{processor._label}: expected no {option} with {delivery}, got "
                f"{option}={value!r}; leave it out, or choose a delivery that uses it."
            )
    if "lease" in uses and processor.lease is None:
        raise InvalidOption(
            f"{processor._label}: expected lease=Lease(…) with {delivery}, got None; set it to the "
            "seconds after which another worker may take a row over."
        )


def _check_retry(processor: Definition[Any], retry: Retry) -> None:
    gives_up = retry.give_up_on or not issubclass(Exception, retry.on)
    if retry.max_attempts is None and gives_up and not processor._has_dead_letter:
        raise InvalidOption(
            f"{processor._label}: expected failed=… with a Retry that gives up on some errors and "
            "has max_attempts=None, got none, so that nothing would show which rows were given up "
            "on; add failed=…, or a number for max_attempts."
        )


def _check_claim(processor: Definition[Any], claim: Values) -> None:
    if claim == processor.done:
        raise InvalidOption(
            f"{processor._label}: expected claim to differ from done, so that a row in doubt "
            f"differs from a finished one, got {dict(claim)!r} for both."
        )
    if processor.lease is None and not constants_of(claim):
        raise InvalidOption(
            f"{processor._label}: expected claim to have at least one constant, by which a claimed "
            f"row is recognised, got {dict(claim)!r}; add a status or a flag to claim, and use "
            "claimed_at=… for the time."
        )
    beside = "a lease" if processor.lease else "retry"
    if processor.reset is None and (processor.lease or processor.retry):
        raise InvalidOption(
            f"{processor._label}: expected reset=… together with claim and {beside}, got no reset; "
            "set reset to the values of a row without the claim, with which it is pending again."
        )


def _check_without_claim(processor: Definition[Any]) -> None:
    is_flipped_first = processor.delivery == Delivery.AT_MOST_ONCE
    if is_flipped_first and not processor._has_fixed_flip:
        raise InvalidOption(
            f"{processor._label}: expected done=… to be a mapping with AT_MOST_ONCE and no claim, "
            "because it is written before the work, got a flip that depends on the handler; add "
            "claim=…."
        )
    for option in ["claimed_at", *["retry"] * is_flipped_first]:
        if getattr(processor, option) is not None:
            raise InvalidOption(
                f"{processor._label}: expected {option} together with claim=…, got "
                f"{str(processor.delivery).upper()} without claim; add claim=…, or leave {option} "
                "out."
            )


def _check_without_groups(processor: Definition[Any]) -> None:
    for option in ("in_order", "max_per_group"):
        if value := getattr(processor, option):
            raise InvalidOption(
                f"{processor._label}: expected {option} together with group_by=…, got "
                f"{option}={value!r} alone; name the column of the key in group_by."
            )


def _check_groups(processor: Definition[Any]) -> None:
    most, marks = processor.max_per_group or 1, (processor.claim, processor.claimed_at)
    if processor.fair_by is not None:
        raise Unsupported(
            f"{processor._label}: expected group_by alone, whose keys take turns anyway, got "
            f"fair_by={processor.fair_by!r} as well; leave fair_by out."
        )
    if processor.max_in_flight is not None:
        raise Unsupported(
            f"{processor._label}: expected group_by alone, which limits the rows of each key, got "
            f"max_in_flight={processor.max_in_flight} as well; leave one of the two out."
        )
    if processor._handles_batches:
        raise Unsupported(
            f"{processor._label}: expected process() with group_by, got process_batch(); write a "
            "processor over the parent, whose pending is Parent.objects.filter(Exists(pending "
            "children)), and whose handler flips the children."
        )
    if processor.in_order and most > 1:
        raise Unsupported(
            f"{processor._label}: expected max_per_group=1 or None with in_order, which handles "
            f"one row of a key at a time, got {most}; leave one of the two out."
        )
    if processor.in_order and processor.batch_size > 1:
        raise Unsupported(
            f"{processor._label}: expected batch_size=1 with in_order, where a row that fails has "
            f"to stop the rows behind it, got {processor.batch_size}; leave one of the two out."
        )
    if processor.delivery == Delivery.AT_MOST_ONCE and None in marks:
        raise InvalidOption(
            f"{processor._label}: expected claim=… and claimed_at=… with group_by and "
            "AT_MOST_ONCE, got a processor without both; add them, because nothing else shows that "
            "a row of the key is in flight."
        )
