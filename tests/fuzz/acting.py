"""What the handlers of an example do beside succeeding, in one copy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

from django.db import connections, transaction

from dcl_processor import Discard, Snooze
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.fuzz.cases import CLOCK, Case
from tests.fuzz.fresh import writing
from tests.fuzz.troubles import AFTER, BEFORE, Act, Lapse, Touch
from tests.fuzz.words import PAST
from tests.waiting import PATIENCE


class PlannedError(Exception):
    """What a handler raises that is to fail."""


@dataclass
class Call:
    """One call of a handler."""

    pk: Any
    act: Act
    #: Its lease, if that is to lapse: another copy may have one of the same row since.
    lease: Any = None
    #: Whether its lease lapsed, and another copy came.
    lost: bool = False


@dataclass
class Log:
    """The calls of all workers, in the order in which they began."""

    #: The rows in the order in which they were made.
    places: dict[Any, int]
    calls: list[Call] = field(default_factory=list)
    counts: Counter[Any] = field(default_factory=Counter)
    lock: Lock = field(default_factory=Lock)

    def begin(self, case: Case, pk: Any) -> tuple[Call, bool]:
        """Note a call; tell whether its lease is to lapse, too."""
        assert case.trouble is not None
        place = self.places[pk]
        plan = case.trouble.plan(place)
        with self.lock:
            number = self.counts[pk]
            self.counts[pk] += 1
            call = Call(pk, plan[number] if number < len(plan) else Act.SUCCEED)
            self.calls.append(call)
        return call, number == 0 and case.trouble.lapses(place)


class Actor:
    """The handler of one copy; ``come``: lets another copy run, in a thread and session of its own.

    A lease lapses by a statement of another session, which passes by a row that is locked: time
    would not pass there either, without the lock being noticed.
    """

    def __init__(self, case: Case, log: Log, come: Callable[[], None]) -> None:
        assert case.trouble is not None
        self._case, self._trouble, self._log, self._come = case, case.trouble, log, come
        self._armed: Call | None = None
        self._countdown = 0
        self._at_work = 0
        self._ended: list[asyncio.Future[None]] = []

    def act(self, row: Any) -> None:
        """Do what is planned for this call."""
        call, lapses = self._log.begin(self._case, row.pk)
        at = self._trouble.lapse if lapses else None
        if at is not None:
            own = self._case.rows(row._state.db).filter(pk=row.pk)
            call.lease = own.values_list(CLOCK, flat=True).get()
        self._lapse(call, at, BEFORE)
        touch(self._case, self._trouble.touch, row)
        if call.lost:
            self._come()
        self._lapse(call, at, AFTER)
        if call.lost and at == AFTER:
            self._come()
        if isinstance(at, int) and HAS_ROW_LOCKS:
            self._armed, self._countdown = call, at
        match call.act:
            case Act.RAISE:
                raise PlannedError(f"planned for row {row.pk}")
            case Act.SNOOZE:
                raise Snooze("planned")
            case Act.DISCARD:
                raise Discard("planned")

    async def act_on_loop(self, handle: Callable[[Any], None], row: Any) -> None:
        """Call the handler in a thread, and end together with all that are under way."""
        self._at_work += 1
        try:
            await asyncio.to_thread(_closing, handle, row)
        finally:
            self._at_work -= 1
            if self._at_work:
                ended = asyncio.get_running_loop().create_future()
                self._ended.append(ended)
                await ended
            else:
                for each in self._ended:
                    each.set_result(None)
                self._ended.clear()

    @contextmanager
    def watched(self, using: str) -> Iterator[None]:
        """Count this copy's statements, and let a lease lapse before one of them."""

        def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
            if self._armed is not None:
                self._countdown -= 1
                if self._countdown < 0:
                    call, self._armed = self._armed, None
                    self._lapse(call, BEFORE, BEFORE)
                    if call.lost:
                        self._come()
            return execute(sql, *args)

        with connections[using].execute_wrapper(wrapper):
            yield

    def _lapse(self, call: Call, at: Lapse | None, now: Lapse) -> None:
        if at == now:
            in_thread(lambda: lapse(self._case, call))


def in_thread(do: Callable[[], None]) -> None:
    """Do it in a thread with sessions of its own, to the end."""
    errors: list[BaseException] = []

    def doing() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)
        finally:
            connections.close_all()

    thread = Thread(target=doing)
    thread.start()
    thread.join(2 * PATIENCE)
    assert not thread.is_alive(), "a copy that did not end"
    if errors:
        raise errors[0]


def _closing(handle: Callable[[Any], None], row: Any) -> None:
    try:
        handle(row)
    finally:
        connections.close_all()


def touch(case: Case, how: Touch, row: Any) -> None:
    """Do to its own row what a handler may do."""
    match how:
        case Touch.SAVE:
            with writing(row._state.db):
                row.save()
        case Touch.REFRESH:
            row.refresh_from_db()
        case Touch.LOCK:
            with writing(row._state.db):
                case.rows(row._state.db).select_for_update().get(pk=row.pk)


def lapse(case: Case, call: Call) -> None:
    """End the lease of the call's row, unless it is locked or has another one, or none."""
    with transaction.atomic(), writing("default"):
        leased = case.rows().filter(pk=call.pk, **{CLOCK: call.lease}).order_by()
        if HAS_ROW_LOCKS:
            leased = leased.select_for_update(skip_locked=True)
        if list(leased.values_list("pk")):
            call.lost = bool(case.rows().filter(pk=call.pk).update(**{CLOCK: PAST}))
