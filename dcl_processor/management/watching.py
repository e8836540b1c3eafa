"""The watch of the command: its options and its output.

It prints a line for each run that did something, and otherwise nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.exceptions import ProcessorError
from dcl_processor.log_fields import fields, log
from dcl_processor.operator.diagnosis import Trouble, in_doubt
from dcl_processor.operator.times import span
from dcl_processor.pending import steady as time
from dcl_processor.processes import pool
from dcl_processor.processes.health import Health
from dcl_processor.processes.news import Died, News
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.report import Report
from dcl_processor.watch.notify import aliases, check_can_listen
from dcl_processor.watch.watch import Plan, Recovered

from .command_line import USAGE_ERROR, number_of_seconds
from .output import Output
from .status import tell_of_doubts

logger = logging.getLogger("dcl_processor")

#: Seconds between two looks: the default, and the minimum.
INTERVAL, SHORTEST_INTERVAL = 5.0, 0.1

#: Seconds after which a trouble that lasts is reported again.
AGAIN_AFTER = 600.0


def add_arguments(parser: CommandParser) -> None:
    """Add the options of a watch."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=number_of_seconds(
            f"from {SHORTEST_INTERVAL}",
            lambda seconds: seconds >= SHORTEST_INTERVAL,
            "; write the names of processors before --watch",
        ),
        const=INTERVAL,
        metavar="SECONDS",
        help=f"Keep running, and look for rows at this interval (default: {INTERVAL:g}).",
    )
    parser.add_argument(
        "--listen",
        action="store_true",
        help="With --watch: look at once when wake() is called; PostgreSQL only.",
    )
    parser.add_argument(
        "--max-runtime",
        type=number_of_seconds("above 0", lambda seconds: seconds > 0),
        metavar="SECONDS",
        help="With --watch: end after this many seconds; the current row is finished.",
    )


def refuse_without_watch(options: dict[str, Any]) -> None:
    """Raise for options that have no meaning for a single run."""
    for option, otherwise in (
        ("listen", "leave --listen out for a single run"),
        ("max_runtime", "use --timeout for a single run"),
    ):
        if options.get(option):
            name = option.replace("_", "-")
            raise CommandError(
                f"expected --watch with --{name}, got --{name} alone; add --watch, or {otherwise}.",
                returncode=USAGE_ERROR,
            )


def watch(
    chosen: Sequence[BatchProcessor[Any]],
    output: Output,
    health: Health,
    options: dict[str, Any],
    *,
    may_supervise: bool,
) -> None:
    """Watch until a signal, or the end that the options set; failed rows do not end the watch."""
    if options["listen"]:
        _check_can_listen(chosen, options["using"])
    runtime = options["max_runtime"]
    plan = Plan(
        interval=options["watch"],
        using=options["using"],
        limit=options["limit"],
        timeout=options["timeout"],
        concurrency=options["concurrency"],
        deadline=None if runtime is None else time.monotonic() + runtime,
        listen=options["listen"],
    )
    names, workers, began = [each.name for each in chosen], options["workers"], time.monotonic()
    log, stop = _Log(output, names, health, "".join(map(in_doubt, chosen))), health.stop
    several = f" with {workers} workers" if workers > 1 else ""
    output.lifecycle(f"watching {' and '.join(names)}{several} (process {os.getpid()})")
    for each in chosen:
        tell_of_doubts(each, output, options["using"])
    try:
        ran = pool.watch(
            chosen,
            plan,
            workers=workers,
            stop=stop,
            tell=log.tell,
            on_counts=options["on_counts"],
            health=health,
            may_supervise=may_supervise,
        )
    except ProcessorError as error:
        raise CommandError(str(error)) from error
    how = f"stopped by {stop.cause}" if stop.is_set() else "ended"
    output.lifecycle(f"{how} after {span(time.monotonic() - began)}")
    if not ran:
        raise CommandError(f"the watch has ended, because none can run: {' and '.join(names)}.")


def _check_can_listen(chosen: Sequence[BatchProcessor[Any]], using: str | None) -> None:
    try:
        for each in sorted(set(aliases(chosen, using).values())):
            check_can_listen(each)
    except ProcessorError as error:
        raise CommandError(str(error), returncode=USAGE_ERROR) from error


class _Log:
    """Writes the news of a watch to the streams and to the log."""

    def __init__(
        self, output: Output, names: list[str], health: Health, left_by_the_dead: str = ""
    ) -> None:
        self.names = names
        self._left_by_the_dead = left_by_the_dead
        self._output = output
        self._outages = ErrorDedup(health.troubles)

    def tell(self, worker: int | None, name: str | None, news: News) -> None:
        who = name or (self.names[0] if len(self.names) == 1 else "")
        number = "" if worker is None else f"worker {worker}"
        label = ", ".join(filter(None, (who, number)))
        match news:
            case Report():
                self._output.watched(news, worker)
            case Died():
                self._died(label, who, worker, news)
            case Trouble():
                self._broke(who, worker, name, news)
            case Recovered():
                seconds = self._outages.end((worker, name))
                if seconds is not None:
                    sentence = f"runs again after {seconds:.1f} s"
                    self._log(logging.WARNING, who, who, worker, sentence)
                    self._output.goes_on(who, sentence)

    @staticmethod
    def _log(level: int, label: str, who: str, worker: int | None, sentence: str) -> None:
        extra = fields(who, worker=worker)
        if not who:  # a worker of several processors
            del extra["processor"]
        log(logger, level, "%s: %s", label, sentence, extra=extra)

    def _broke(self, who: str, worker: int | None, name: str | None, trouble: Trouble) -> None:
        if self._outages.say((worker, name), trouble.sentence):
            self._log(logging.ERROR, who, who, worker, trouble.sentence)
            self._output.watch_broke(who, trouble, name, worker)

    def _died(self, label: str, who: str, worker: int | None, death: Died) -> None:
        # The next worker has no troubles yet, and would not report their end.
        for each in self.names:
            self._outages.end((worker, each))
        sentence = f"{death}{self._left_by_the_dead}"
        self._log(logging.ERROR, label, who, worker, sentence)
        trouble = Trouble(sentence, death.trouble.traceback)
        self._output.watch_broke(label, trouble, None, worker)


class ErrorDedup:
    """The processors and workers that are in trouble, since when, and why (``troubles``)."""

    def __init__(self, troubles: dict[Any, str]) -> None:
        self._why = troubles
        self._since: dict[Any, float] = {}
        self._said: dict[str, float] = {}

    def say(self, who: Hashable, sentence: str) -> bool:
        """Note the trouble; return whether to report it.

        So is a cause that none of the others has, and again one that lasts.
        """
        now = time.monotonic()
        self._why[who] = sentence
        self._since.setdefault(who, now)
        if now - self._said.get(sentence, -AGAIN_AFTER) < AGAIN_AFTER:
            return False
        self._said[sentence] = now
        return True

    def end(self, who: Hashable) -> float | None:
        """Note that the trouble is over; return how many seconds it lasted, if it is the last."""
        why, since = self._why.pop(who, None), self._since.pop(who, 0.0)
        if why is None or why in self._why.values():
            return None
        last = set(self._why.values())
        self._said = {each: at for each, at in self._said.items() if each in last}
        return time.monotonic() - since
