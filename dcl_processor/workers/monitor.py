"""A thread that shows that its process lives, and ends it if a handler cannot be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from dcl_processor.engine import calls
from dcl_processor.engine.calls import Limited
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import printable

#: Seconds between two looks.
PACE = 1.0

#: Seconds that a handler has to end in after its ``handler_timeout``, at which it is interrupted.
#: They are counted by looks: after a pause of the whole machine a handler gets all of them.
GRACE = 30

STDERR = 2

#: Characters of the keys of its rows.
LONGEST = 200


class Monitor:
    """Looks at this process in each ``pace`` (seconds), until the block ends.

    ``beat`` is called at each look, in the monitor's thread; ``may_end``: whether it may end the
    process. The thread runs only as long as Python
    runs other threads: a process that is stopped, or whose handler keeps the GIL, is shown by what
    ``beat`` does not do any more.
    """

    def __init__(
        self, beat: Callable[[], None], pace: float = PACE, *, may_end: bool = True
    ) -> None:
        self._beat, self._pace, self._may_end = beat, pace, may_end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        #: The calls that are late, and the looks since then.
        self._late: dict[Limited, int] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join(PACE)

    def _run(self) -> None:
        while not self._over.is_set():
            # The next look is still to come, so no error ends the thread.
            with suppress(Exception):
                self._beat()
            if self._may_end:
                with suppress(Exception):
                    self._look()
            self._over.wait(self._pace)

    def _look(self) -> None:
        now = time.monotonic()
        late = [each for each in [*calls.limited] if now - each.since > each.limit]
        self._late = {each: self._late.get(each, 0) + 1 for each in late}
        # Of several on one event loop, the oldest has begun to keep the others from their end.
        for call in sorted(late, key=lambda call: call.since):
            if self._late[call] * self._pace > GRACE:
                end(call)


def end(call: Limited) -> None:
    """End this process, by a signal that no handler can catch, with a line on stderr."""
    try:
        rows = printable(", ".join(map(str, call.pks)))[:LONGEST]
    except Exception:  # noqa: BLE001  # a key's own __str__() is arbitrary code
        rows = "?"
    line = (
        f"{call.label}: row {rows} did not leave its handler within {GRACE} s after "
        f"handler_timeout={call.limit:g}; process {os.getpid()} ends itself\n"
    )
    # Neither through Python's stream, whose lock a handler may hold, nor for longer than a moment:
    # the reader may have stopped.
    writer = threading.Thread(target=os.write, args=(STDERR, line.encode()), daemon=True)
    writer.start()
    writer.join(PACE)
    os.kill(os.getpid(), signal.SIGKILL)
