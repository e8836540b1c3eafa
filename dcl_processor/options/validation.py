"""Checks of a definition that need no model and no database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    refuse,
)

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
    _check_together(processor)


def refuse_rows(processor: Definition[Any], rows: tuple[object, ...]) -> None:
    """Raise ``TypeError``, with what to call instead, if a processor is called like its handler."""
    if rows:
        raise TypeError(
            f"expected {processor.__name__}() without a row, because it runs over all pending "
            f"rows, got {rows[0]!r}; call {processor.__name__}.process(row) to handle one row, or "
            f"{processor.__name__}(filter=Q(pk=…)) to run for some rows."
        )


def _check_values(processor: Definition[Any]) -> None:
    """Check each option without regard to the others."""
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
            f"such as {{'sent': True}}, got {flip!r}{_as_a_method(option, flip)}."
        )
    if not flip:
        leave = " when the handler itself takes the row out of pending" if option == "done" else ""
        raise InvalidDone(
            f"{processor._label}: expected {option} to name at least one column, got {{}}; leave "
            f"it out{leave}."
        )


def _as_a_method(option: str, flip: Any) -> str:
    if option in {"done", "failed"} and callable(flip):
        return f"; in a class, write the method get_{option}() instead"
    return ""


#: The sentence about handlers that would share a transaction.
NO_CONCURRENCY = (
    "concurrency=1 with TRANSACTIONAL, whose handlers work in the transaction of the run, got {}; "
    "start more workers, or choose AT_LEAST_ONCE or AT_MOST_ONCE"
)


def _check_together(processor: Definition[Any]) -> None:
    """Refuse options that are right alone, but not together."""
    _check_delivery(processor, str(processor.delivery).upper())
    if processor.retry is not None:
        _check_retry(processor, processor.retry)
    if processor.claim is not None:
        _check_claim(processor, processor.claim)
    else:
        _check_without_claim(processor)
    if processor.group_by is not None:
        _check_groups(processor, str(processor.delivery).upper())
    else:
        for option in ("in_order", "max_per_group"):
            value = getattr(processor, option)
            sentence = (
                f"{option} together with group_by=…, got {option}={value!r} alone; name the column "
                "of the key in group_by"
            )
            refuse(processor._label, value, InvalidOption, sentence)


def _check_delivery(processor: Definition[Any], delivery: str) -> None:
    uses, is_at_most_once = USES[processor.delivery], processor.delivery == Delivery.AT_MOST_ONCE
    refuse(
        processor._label,
        is_at_most_once and processor._handles_batches,
        Unsupported,
        "process() with AT_MOST_ONCE, got process_batch(), whose error would leave all rows of a "
        "batch in doubt; write process(), or choose another delivery",
    )
    refuse(
        processor._label,
        processor.is_transactional and processor.concurrency > 1,
        Unsupported,
        NO_CONCURRENCY.format(processor.concurrency),
    )
    refuse(
        processor._label,
        is_at_most_once and processor.max_in_flight is not None,
        Unsupported,
        "no max_in_flight with AT_MOST_ONCE, whose rows in doubt would use it up, got "
        f"{processor.max_in_flight}; leave it out",
    )
    for option in sorted(frozenset().union(*USES.values()) - uses):
        value = getattr(processor, option)
        sentence = (
            f"no {option} with {delivery}, got {option}={value!r}; leave it out, or choose a "
            "delivery that uses it"
        )
        refuse(processor._label, value is not None, InvalidOption, sentence)
    refuse(
        processor._label,
        "lease" in uses and processor.lease is None,
        InvalidOption,
        f"lease=Lease(…) with {delivery}, got None; set it to the seconds after which another "
        "worker may take a row over",
    )


def _check_retry(processor: Definition[Any], retry: Retry) -> None:
    gives_up = retry.max_attempts is None and (
        retry.give_up_on or not issubclass(Exception, retry.on)
    )
    refuse(
        processor._label,
        gives_up and not processor._has_dead_letter,
        InvalidOption,
        "failed=… with a Retry that gives up on some errors and has max_attempts=None, got none, "
        "so that nothing would show which rows were given up on; add failed=…, or a number for "
        "max_attempts",
    )


def _check_claim(processor: Definition[Any], claim: Values) -> None:
    beside = "a lease" if processor.lease else "retry"
    refuse(
        processor._label,
        claim == processor.done,
        InvalidOption,
        "claim to differ from done, so that a row in doubt differs from a finished one, got "
        f"{dict(claim)!r} for both",
    )
    refuse(
        processor._label,
        processor.lease is None and not constants_of(claim),
        InvalidOption,
        "claim to have at least one constant, by which a claimed row is recognised, got "
        f"{dict(claim)!r}; add a status or a flag to claim, and use claimed_at=… for the time",
    )
    refuse(
        processor._label,
        processor.reset is None and (processor.lease or processor.retry),
        InvalidOption,
        f"reset=… together with claim and {beside}, got no reset; set reset to the values of a row "
        "without the claim, with which it is pending again",
    )


def _check_without_claim(processor: Definition[Any]) -> None:
    is_flipped_first = processor.delivery == Delivery.AT_MOST_ONCE
    refuse(
        processor._label,
        is_flipped_first and not processor._has_fixed_flip,
        InvalidOption,
        "done=… to be a mapping with AT_MOST_ONCE and no claim, because it is written before the "
        "work, got a flip that depends on the handler; add claim=…",
    )
    for option in ["claimed_at", *["retry"] * is_flipped_first]:
        sentence = (
            f"{option} together with claim=…, got {str(processor.delivery).upper()} without claim; "
            f"add claim=…, or leave {option} out"
        )
        refuse(processor._label, getattr(processor, option) is not None, InvalidOption, sentence)


def _check_groups(processor: Definition[Any], delivery: str) -> None:
    most = processor.max_per_group or 1
    refuse(
        processor._label,
        processor.fair_by is not None,
        Unsupported,
        f"group_by alone, whose keys take turns anyway, got fair_by={processor.fair_by!r} as well; "
        "leave fair_by out",
    )
    refuse(
        processor._label,
        processor._handles_batches,
        Unsupported,
        "process() with group_by, got process_batch(); write a processor over the parent, whose "
        "pending is Parent.objects.filter(Exists(pending children)), and whose handler flips the "
        "children",
    )
    refuse(
        processor._label,
        processor.in_order and most > 1,
        Unsupported,
        "max_per_group=1 or None with in_order, which handles one row of a key at a time, got "
        f"{most}; leave one of the two out",
    )
    refuse(
        processor._label,
        processor.in_order and processor.batch_size > 1,
        Unsupported,
        "batch_size=1 with in_order, where a row that fails has to stop the rows behind it, got "
        f"{processor.batch_size}; leave one of the two out",
    )
    refuse(
        processor._label,
        processor.delivery == Delivery.AT_MOST_ONCE
        and None in (processor.claim, processor.claimed_at),
        InvalidOption,
        f"claim=… and claimed_at=… with group_by and {delivery}, got a processor without both; add "
        "them, because nothing else shows that a row of the key is in flight",
    )
