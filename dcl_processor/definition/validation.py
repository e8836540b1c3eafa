"""Checks of a definition that need no model and no database."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidDone, InvalidOption, Unsupported

from . import deliveries, functions
from .functions import label as _label
from .kinds import RULES
from .lease import Lease
from .retry import Retry

if TYPE_CHECKING:
    from .definition import Definition


def check_options(processor: Definition[Any], missing: AbstractSet[str]) -> None:
    """Refuse options that cannot work, in either spelling; ``missing``: methods not written."""
    if missing:
        raise InvalidOption(
            f"{_label(processor)}: expected the methods pending(self) and process(self, row), got "
            f"no {' and no '.join(sorted(missing))}; write what is missing."
        )
    _check_delivery(processor)
    _check_batch_size(processor)
    for name in ("strict_order", "repeats"):
        _expect(processor, name, bool, "True or False")
    for name in ("using", "read_using"):
        _expect(processor, name, str | None, "the name of a database in DATABASES")
    _check_name(processor)
    functions.check(processor)
    for option in ("done", "failed", "reset", "claim"):
        _check_flip(processor, option)
    _expect(processor, "retry", Retry | None, "a Retry")
    _expect(processor, "lease", Lease | None, "a Lease")
    _expect(processor, "claimed_at", str | None, "the name of a column")
    deliveries.check(processor)
    _check_most(processor)
    _check_concurrency(processor)
    if processor.strict_order and processor.repeats:
        raise Unsupported(
            f"{_label(processor)}: expected strict_order or repeats, got both: a row that stays "
            "pending would be at the head of the order forever; leave one of them out."
        )


def refuse_rows(processor: Definition[Any], rows: tuple[object, ...]) -> None:
    """Raise ``TypeError``, with what to call instead, if a processor is called like its handler."""
    if rows:
        raise TypeError(
            f"{processor.__name__}() runs over all pending rows and takes no row, got "
            f"{rows[0]!r}; call {processor.__name__}.process(row) to handle one row, or "
            f"{processor.__name__}(filter=Q(pk=…)) to run for some."
        )


def _check_delivery(processor: Definition[Any]) -> None:
    if processor.delivery not in list(RULES):
        raise InvalidOption(
            f"{_label(processor)}: expected delivery to be one of "
            f"{', '.join(str(d) for d in RULES)}, got {processor.delivery!r}."
        )


def _check_batch_size(processor: Definition[Any]) -> None:
    size: Any = processor.batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidOption(
            f"{_label(processor)}: expected batch_size to be a whole number of rows from 1, "
            f"got {size!r}."
        )


def _check_concurrency(processor: Definition[Any]) -> None:
    handlers: Any = processor.concurrency
    if not isinstance(handlers, int) or isinstance(handlers, bool) or handlers < 1:
        raise InvalidOption(
            f"{_label(processor)}: expected concurrency to be a number of handlers from 1, got "
            f"{handlers!r}."
        )


def _check_name(processor: Definition[Any]) -> None:
    _expect(processor, "name", str, "a string")
    name = processor.name
    if not name or name != name.strip():
        raise InvalidOption(f"{_label(processor)}: expected name to be a word, got {name!r}.")


def _check_most(processor: Definition[Any]) -> None:
    most: Any = processor.max_consecutive_failures
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise InvalidOption(
            f"{_label(processor)}: expected max_consecutive_failures to be a number of rows from "
            f"1, or 0 for no end, got {most!r}."
        )


def _check_flip(processor: Definition[Any], option: str) -> None:
    flip: Any = getattr(processor, option)
    if flip is None:
        return
    if not isinstance(flip, Mapping) or not all(isinstance(name, str) for name in flip):
        raise InvalidDone(
            f"{_label(processor)}: expected {option} to be a mapping of column names to values, "
            f"such as {{'sent': True}}, got {flip!r}{_as_a_method(option, flip)}."
        )
    if not flip:
        leave = " when the handler itself takes the row out of pending" if option == "done" else ""
        raise InvalidDone(
            f"{_label(processor)}: expected {option} to name at least one column, got {{}}; leave "
            f"it out{leave}."
        )


def _as_a_method(option: str, flip: Any) -> str:
    if option in {"done", "failed"} and callable(flip):
        return f"; in a class write the method get_{option}(), which the decorator makes of it"
    return ""


def _expect(processor: Definition[Any], name: str, kind: Any, words: str) -> None:
    value = getattr(processor, name)
    if not isinstance(value, kind):
        raise InvalidOption(f"{_label(processor)}: expected {name} to be {words}, got {value!r}.")
