"""The systems that drain rows here, each with the parameters that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Drained:
    """What one copy says of its share.

    ``handled``: rows, where the contender counts them. To ask the table would add a message to the
    contender's own. ``seconds``: where only the contender can tell.
    """

    handled: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of handling rows.

    ``module`` has the functions ``prepare(rows)``, which makes that many rows (or jobs) with
    numbers from 1; ``drain(...)``, which handles what one copy can get and returns ``Drained``;
    and ``left()``, which counts what is not handled. ``options`` are passed to ``drain``, and
    ``functions`` has the names of those that are called otherwise.

    ``clock``: *drain* times the whole call of ``drain`` in all workers. *handler* starts with the
    first handler call and ends with the last one, so that a worker's start and its last look at
    an empty queue cost it nothing.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    clock: Literal["drain", "handler"] = "drain"
    functions: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, rows: int) -> None:
        self._load("prepare")(rows)

    def drainer(self) -> Callable[..., Drained]:
        """Return what drains; to call it needs no import any more."""
        return partial(self._load("drain"), **self.options)

    def left(self) -> int:
        return int(self._load("left")())

    def is_installed(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    def _load(self, name: str) -> Callable[..., Any]:
        module = import_module(f"{__name__}.{self.module}")
        found: Callable[..., Any] = getattr(module, self.functions.get(name, name))
        return found


def _small(drain: str, **options: Any) -> Contender:
    return Contender("small", options, functions={"drain": drain})


OURS = "transactional, batch 1"
COMMAND = "transactional, batch 1, by the command"
WATCHED = "transactional, batch 1, ledger, metrics and traces"
#: Runs of one row: by hand, and of each delivery by a call and by the command.
BY_HAND = "loop by hand, one row"
DELIVERIES = ("transactional", "at_most_once", "at_least_once")
SMALL = {each: f"{each}, one row" for each in DELIVERIES}
SMALL_COMMAND = {each: f"{each}, one row, by the command" for each in DELIVERIES}
ARTICLE = "article's loop"
BATCH = "transactional, batch 100"
LARGE_BATCH = "transactional, batch 500"
RAW = "raw statements, batch 500"
PGQUEUER = "pgqueuer, batch 100"
IN_ORDER = "at least once, in order, concurrency 20"
LOCKS = "procrastinate, lock, concurrency 20"

CONTENDERS: Mapping[str, Contender] = {
    OURS: Contender("ours", {"batch_size": 1}),
    COMMAND: Contender("ours", functions={"drain": "drain_command"}),
    WATCHED: Contender("ours", needs="opentelemetry", functions={"drain": "drain_watched"}),
    BY_HAND: _small("drain_by_hand"),
    **{name: _small("drain_ours", delivery=each) for each, name in SMALL.items()},
    **{name: _small("drain_command", delivery=each) for each, name in SMALL_COMMAND.items()},
    BATCH: Contender("ours", {"batch_size": 100}),
    LARGE_BATCH: Contender("ours", {"batch_size": 500}),
    ARTICLE: Contender("article"),
    RAW: Contender("raw", {"batch_size": 500}),
    PGQUEUER: Contender("pgqueuer", {"batch_size": 100}, needs="pgqueuer", clock="handler"),
    IN_ORDER: Contender("ours", functions={"prepare": "fill_keys", "drain": "drain_in_order"}),
    LOCKS: Contender("procrastinate", needs="procrastinate", clock="handler"),
}
