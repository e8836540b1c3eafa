"""Every exception of the package goes to another process and comes back as it was."""

from __future__ import annotations

import copy
import inspect
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest

from dcl_processor import Discard, Snooze, exceptions
from dcl_processor.exceptions import ProcessorError

#: What those are made with that are not made with a sentence.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "TransactionLost": {},
    "SessionLost": {},
    "TransactionLeftOpen": {"shared": True},
    "ReadOnlyDatabase": {"using": "default"},
    "RowsFailed": {"report": "1 failed"},
    "ReservationLost": {"name": "shop.Order", "pk": 3, "reason": "lapsed"},
    "HandlerExited": {"error": SystemExit(3)},
    "HandlerTimeout": {"seconds": 2.5},
    "AttemptsUsedUp": {"attempts": 3},
}

CLASSES = [
    each
    for each in vars(exceptions).values()
    if inspect.isclass(each) and issubclass(each, ProcessorError)
]

ERRORS = [
    *[
        each(**ARGUMENTS[each.__name__]) if each.__name__ in ARGUMENTS else each("a sentence")
        for each in CLASSES
    ],
    Discard("never"),
    Snooze("later", delay=3),
    Snooze(until=datetime(2026, 1, 1, tzinfo=UTC)),
]


def pickled(error: Exception) -> Any:
    return pickle.loads(pickle.dumps(error))  # noqa: S301  # its own


@pytest.mark.parametrize("through", [copy.copy, pickled])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_can_be_copied_and_pickled(error: Exception, through: Any) -> None:
    again = through(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
