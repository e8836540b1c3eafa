"""What happens to rows of the hot key while they are handled, each as a function.

Whatever makes a row wait again, or in another key, says when: not before it was committed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

from django.db import connection, connections, transaction
from django.db.models import Q

from dcl_processor import BatchProcessor, Lease
from tests.models import Errand

from . import processors
from .audit import Wait
from .table import APART, KEYS

#: Seconds that a lock or an open transaction lasts.
HOLD = 0.05
#: Seconds of the shortest lease, which its worker renews late.
SHORT = 1.0

IDLE = Q(done=False, claimed=False, leased_until__isnull=True)


@dataclass
class Troubles:
    """Makes trouble in a thread of its own; ``waits``: grows by what comes to wait.

    ``times``: how often each kind is tried at most.
    """

    delivery: str
    mode: str
    waits: list[Wait]
    times: int
    #: How often each row is to be handled more than once.
    again: Counter[int] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)
    dice: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311  # no secret
    over: Event = field(default_factory=Event)
    _errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._make)
        self._late = 0

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Wait for the last one; raise what it raised."""
        self.over.set()
        self._thread.join()
        if self._errors:
            raise self._errors[0]

    def _make(self) -> None:
        try:
            for number in range(self.times):
                # It takes a second.
                late = self.delivery == "at_least_once" and number % 10 == 0
                for kind in [renew_late, *KINDS] if late else KINDS:
                    if self.over.wait(HOLD):
                        return
                    self.made[kind.__name__] += kind(self)
        except BaseException as error:  # noqa: BLE001  # raised again by end()
            self._errors.append(error)
        finally:
            connections.close_all()

    def processor(self, **options: Any) -> BatchProcessor[Errand]:
        return processors.processor(self.delivery, self.mode, **options)

    def head(self) -> int | None:
        """Return the first row of the hot key that waits."""
        rows = Errand.objects.filter(place=0, done=False).order_by("pk")
        return rows.values_list("pk", flat=True).first()

    def late_key(self, below: int) -> int:
        """Return a key that no row has had, below another one."""
        self._late += 1
        place = max(1, below // APART - 1 - self._late % 3)
        return place * APART + 1 + self._late % (APART - 1)


def commit_late(troubles: Troubles) -> bool:
    """Commit a row whose key is lower than those of rows that were handled meanwhile."""
    head = troubles.head()
    if head is None:
        return False
    late = troubles.late_key(head)
    if Errand.objects.filter(pk=late).exists():
        return False
    came = time.time()
    with transaction.atomic():
        Errand.objects.create(pk=late, place=0)
        time.sleep(HOLD)
    troubles.waits.append(Wait(late, 0, came, time.time()))
    return True


def put_back(troubles: Troubles) -> bool:
    """Requeue a row of the hot key that is done."""
    done = Errand.objects.filter(place=0, done=True)
    pks = list(done.order_by("-pk").values_list("pk", flat=True)[:20])
    if not pks or troubles.head() is None:
        return False
    pk = troubles.dice.choice(pks)
    came = time.time()
    count = troubles.processor().requeue(done.filter(pk=pk), force=True)
    if count:
        troubles.again[pk] += 1
        troubles.waits.append(Wait(pk, 0, came, time.time()))
    return bool(count)


def lock_head(troubles: Troubles) -> bool:
    """Lock the head in a session that does nothing with it."""
    head = troubles.head()
    if head is None:
        return False
    with transaction.atomic():
        found = Errand.objects.filter(pk=head).select_for_update(skip_locked=True)
        held = bool(found.values_list("pk", flat=True))
        if held:
            time.sleep(HOLD)
    return held


def move(troubles: Troubles) -> bool:
    """Move a row that waits in the hot key to another one."""
    with transaction.atomic():
        rows = Errand.objects.filter(IDLE, place=0).order_by("pk")
        found = list(rows.select_for_update(skip_locked=True).values_list("pk", flat=True)[:3])
        if not found:
            return False
        [pk] = found[-1:]
        key = troubles.dice.randrange(1, KEYS)
        came = time.time()
        Errand.objects.filter(pk=pk).update(place=key)
    troubles.waits[:] = [
        replace(each, until=min(each.until, came)) if each.row == pk else each
        for each in troubles.waits
    ]
    troubles.waits.append(Wait(pk, key, came, time.time()))
    return True


def renew_late(troubles: Troubles) -> bool:
    """Have a row handed out, and renew its lease by a statement whose commit comes too late."""
    processor = troubles.processor(lease=Lease(SHORT))
    # The key is free between two rows only.
    tries = (processor.reserve(1, filter=Q(place=0)) for _ in range(50))
    handed = next((each for each in tries if each or troubles.over.wait(0.01)), [])
    if not handed:
        return False
    [reserved] = handed
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "UPDATE tests_errand SET leased_until = clock_timestamp() + make_interval(secs => %s) "
            "WHERE id = %s AND leased_until = %s AND leased_until > clock_timestamp() "
            "AND NOT done",
            [SHORT + 5 * HOLD, reserved.row.pk, reserved.expires_at],
        )
        renewed = bool(cursor.rowcount > 0)
        time.sleep(SHORT + HOLD)
    return renewed


KINDS: list[Callable[[Troubles], bool]] = [commit_late, put_back, lock_head, move]
