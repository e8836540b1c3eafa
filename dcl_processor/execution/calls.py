"""The calls of handlers that are under way in this process.

Another thread reads them: the one that tells of a row that takes long, and the one that ends a call
whose time is over.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dcl_processor import observers
from dcl_processor import steady as time
from dcl_processor.definition.kinds import rules_of
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.log_fields import running
from dcl_processor.outcomes import returned_error
from dcl_processor.signals import row_started

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .time_limit import TimeLimit

T = TypeVar("T")

#: Seconds that an interrupted handler has to end in.
GRACE = 10.0


class CallLimits(Protocol):
    """What limits the calls of one run; ``seconds``: of each, if there is a limit."""

    @property
    def seconds(self) -> float | None:
        raise NotImplementedError

    def is_held_up(self, call: Call) -> bool:
        """Return whether another call blocks the interruption of this call."""
        raise NotImplementedError


class Call:
    """A call of a handler; ``keys``: of its rows; ``limits``: what limits it, if anything does.

    ``since``: its beginning, by the monotonic clock; ``duration``: its seconds, when it has ended.
    ``attempt``: the number of the row's attempt, if a ``retry`` counts it and there is one row.
    """

    __slots__ = ("attempt", "duration", "keys", "label", "limits", "pid", "since")

    def __init__(
        self, label: str, keys: Sequence[Any], limits: CallLimits | None, attempt: int | None = None
    ) -> None:
        self.label = label
        self.keys = keys
        self.limits = limits
        self.attempt = attempt
        self.duration: float | None = None
        self.since = time.monotonic()
        #: The process in which the handler is called.
        self.pid = os.getpid()

    @property
    def limit(self) -> float | None:
        """The seconds that it may take."""
        return None if self.limits is None else self.limits.seconds

    @property
    def is_held_up(self) -> bool:
        """Whether another call keeps this one from being ended at its limit."""
        return self.limits is not None and self.limits.is_held_up(self)

    def is_late(self, now: float) -> bool:
        """Return whether the call has gone on for longer than its limit."""
        return self.limit is not None and now - self.since > self.limit


#: A set because adding to it, and taking from it, need no lock.
_under_way: set[Call] = set()


def under_way() -> list[Call]:
    """Return the calls that have not returned, the oldest first."""
    return sorted(_under_way.copy(), key=lambda call: call.since)


def begin(call: Call) -> None:
    """Note a call; ``end()`` has to follow."""
    _under_way.add(call)


def end(call: Call) -> None:
    """Forget a call; it may be forgotten already."""
    if os.getpid() != call.pid:
        end_child()
    call.duration = time.monotonic() - call.since
    _under_way.discard(call)


def end_child() -> None:
    """End the process that a handler has forked, in the place of the handler's end."""
    # Race: double claim. It would go on with the run, on its parent's session.
    code: Any = 0
    match sys.exc_info()[1]:
        case None | SystemExit(code=None):
            pass
        case SystemExit(code=int(code)):
            pass
        case error:
            traceback.print_exception(error)
            code = 1
    os._exit(code)


def abandoned(limits: CallLimits) -> set[Any]:
    """Return the keys of rows whose handlers go on although they were interrupted long ago.

    ``limits``: of one run, because another one may have taken such a row over since.
    """
    now, seconds = time.monotonic(), limits.seconds
    if seconds is None:
        return set()
    return {
        key
        for call in _under_way.copy()
        if call.limits is limits and now - call.since > seconds + GRACE
        for key in call.keys
    }


def noted(call: Call, limit: TimeLimit | None, function: Callable[..., T], *arguments: Any) -> T:
    """Make the call of a plain function, note that it is under way, and interrupt it at its limit.

    Raises what the function raises, and ``HandlerTimeout`` when the limit was reached.
    """
    try:
        _under_way.add(call)
        if limit is None:
            return function(*arguments)
        return limit.keep(call, function, *arguments)
    finally:
        if os.getpid() != call.pid:
            end_child()
        call.duration = time.monotonic() - call.since
        _under_way.discard(call)


def announced(
    processor: Definition[Any],
    call: Call,
    limit: TimeLimit | None,
    function: Callable[..., T],
    *arguments: Any,
) -> T:
    """Make the call of a handler as ``noted()`` does; the receivers and the observers learn of it.

    That is not counted as the handler's time, but is noted and limited in the same way.
    """
    handling = observers.Handling(call, running.get())
    try:
        try:
            noted(call, limit, _announce, processor, handling)
        finally:
            call.duration = None
        call.since = time.monotonic()
        result = noted(call, limit, function, *arguments)
    except BaseException as error:
        observers.tell("handler_ended", handling, error)
        raise
    returned = None if result is None else returned_error(result)
    observers.tell("handler_ended", handling, returned)
    return result


def _announce(processor: Definition[Any], handling: observers.Handling) -> None:
    if row_started.receivers:
        for sent in starts(processor, handling.call):
            row_started.send_robust(**sent)
    observers.tell("handler_started", handling)


def starts(processor: Definition[Any], call: Call) -> list[dict[str, Any]]:
    """Return what ``row_started`` is sent with, for each row of a call."""
    common = {"sender": type(processor), "processor": processor, "attempt": call.attempt}
    return [{**common, "pk": pk} for pk in call.keys]


# --- keeps a handler from what only code outside its processor's run may do


#: The processors in whose runs this code runs; the threads of a run have its context.
entered_now: ContextVar[tuple[object, ...]] = ContextVar("dcl_processor_running", default=())


@contextmanager
def entered(processor: Definition[Any]) -> Iterator[None]:
    """Record that the processor runs; raise ``Unsupported`` if it already does."""
    outer = entered_now.get()
    if not hasattr(processor, "_identity"):
        raise InvalidOption(
            f"expected {type(processor).__name__}.__init__() to call super().__init__(), which "
            "checks the options, got a processor without them."
        )
    if _runs(processor):
        raise Unsupported(
            f"{processor.name}: expected the handler not to run its own processor, got a run "
            "inside a run, which would nest once more for every row; remove the call, because the "
            "current run takes the other rows."
        )
    token = entered_now.set((*outer, processor._identity))
    try:
        yield
    finally:
        entered_now.reset(token)


def refuse_key_with_others(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` where ``lock_key()`` would wait for another handler of the processor.

    With several rows of a key in flight in one transaction each, a key has as many locks. A handler
    has one of them until its transaction ends, and two handlers would wait for each other's.
    """
    most = processor.max_per_group or 1
    if most > 1 and rules_of(processor).in_transaction and _runs(processor):
        raise Unsupported(
            f"{processor.name}: expected lock_key() outside the handlers of a processor with "
            f"{str(processor.delivery).upper()} and max_per_group={most}, where two handlers of "
            "one key would wait for each other, got a call in one of them; leave max_per_group "
            "out, choose AT_LEAST_ONCE, or insert the rows after the run."
        )


def _runs(processor: Definition[Any]) -> bool:
    """Return whether this code runs in a run of the processor."""
    return any(each is processor._identity for each in entered_now.get())
