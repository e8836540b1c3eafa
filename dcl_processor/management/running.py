"""``processors run``: what is pending now, or, with ``--watch``, what becomes pending."""

from __future__ import annotations

import argparse
import logging
import os
import random
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db import close_old_connections, connections

from dcl_processor.checks import refusals
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    add_names_or_all,
    add_using,
    chosen,
    duration,
    misuse,
)
from dcl_processor.management.printing import Output
from dcl_processor.management.progress import shown
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.log import log
from dcl_processor.report.report import Report
from dcl_processor.workers.health import Health, Monitor, Notifier
from dcl_processor.workers.stopping import Stop, polite_stop, workers_stop
from dcl_processor.workers.supervisor import (
    MOST_WORKERS,
    Membership,
    Supervisor,
    label,
    name_sessions,
)
from dcl_processor.workers.watch import Event, Plan, Recovered, Watch

#: Seconds between two looks of a watch: the default, and the minimum.
INTERVAL, SHORTEST_INTERVAL = 5.0, 0.1

#: Seconds after which a trouble that lasts is reported again.
AGAIN_AFTER = 600.0


def add_run(parser: argparse.ArgumentParser) -> None:
    add_names_or_all(parser)
    add = parser.add_argument
    text = "Maximum number of rows to try, for each processor and worker; of a watch, in each run."
    add("--limit", type=int, metavar="ROWS", help=text)
    text = "Time after which no row starts, for all processors; a watch ends."
    add("--timeout", type=duration, metavar="TIME", help=text)
    text = "Worker processes on this machine, each of which runs this command."
    add("--workers", type=int, default=1, metavar="N", help=text)
    text = "Handlers at once in each worker, instead of the processors' own concurrency."
    add("--concurrency", type=int, metavar="N", help=text)
    text = "Write this file each second while the command is alive."
    # A handler may change the working directory.
    add("--health-file", type=lambda path: Path(path).absolute(), metavar="PATH", help=text)
    text = "With --watch: look at once when wake() is called; PostgreSQL only."
    add("--listen", action="store_true", help=text)
    add_using(parser)
    add = parser.add_mutually_exclusive_group().add_argument
    text = f"Keep running, and look for rows at this interval (default: {INTERVAL:g} s)."
    how: dict[str, Any] = {"nargs": "?", "const": INTERVAL, "metavar": "TIME"}
    add("--watch", type=duration, help=text, **how)
    text = "Show what a run would do; call no handler, and change nothing."
    add("--dry-run", action="store_true", help=text)


def run(options: dict[str, Any], output: Output) -> None:
    """Handle the rows that are pending now."""
    _refuse(options)
    is_own = options["owns_process"]
    # The variables of a program that calls the command are its own.
    environment = os.environ if is_own else dict[str, str]()
    member, notifier = Membership.taken_from(environment), Notifier.taken_from(environment)
    began = time.monotonic() if member is None else member.began
    deadline = None if options["timeout"] is None else began + options["timeout"]
    file = options["health_file"] if member is None else None  # which the parent writes
    if is_own:
        _show_operations()
    with (
        chosen(options["names"], output) as processors,
        polite_stop(_acknowledge) if member is None else workers_stop() as stop,
        closing(Health([each.name for each in processors], stop.is_set, file, notifier)) as health,
    ):
        try:
            health.ready()
        except OSError as error:
            expected = "expected --health-file to name a file that can be written"
            raise misuse(f"{expected}, got {file}: {error.strerror}.") from error
        if options["workers"] > 1 and member is None:
            _supervise(options, output, health, stop, deadline)
            return
        if is_own:
            number = [] if member is None else [member.number, options["workers"]]
            name_sessions(label(health.names, *number))
        # One line has no room for several workers.
        line = shown(output.stderr) if member is None else nullcontext()
        with Monitor(partial(_beat, member, health, stop), may_end=is_own), line:
            _Work(options, output, health, stop, deadline).do(processors)


def _refuse(options: dict[str, Any]) -> None:
    interval, workers = options["watch"], options["workers"]
    if not 1 <= workers <= MOST_WORKERS:
        raise misuse(f"expected --workers to be from 1 to {MOST_WORKERS}, got {workers}.")
    if interval is not None and interval < SHORTEST_INTERVAL:
        raise misuse(f"expected --watch to be {SHORTEST_INTERVAL} or more, got {interval:g}.")
    if options["listen"] and interval is None:
        raise misuse("expected --watch beside --listen, got --listen alone; add --watch.")


def _show_operations() -> None:
    """Show on stderr what is in no report, and not the rest, where no logging is configured."""
    logger, operations = map(logging.getLogger, ("dcl_processor", "dcl_processor.operations"))
    if not operations.hasHandlers():
        logger.addHandler(logging.NullHandler())
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        operations.addHandler(handler)


def _acknowledge(signal: str) -> None:
    # Not by Python's stream, which may be in the middle of a write, and is not reentrant.
    with suppress(OSError):
        os.write(2, f"{signal}: finishing the rows at hand\n".encode())


def _beat(member: Membership | None, health: Health, stop: Stop) -> None:
    """Show that this process is alive; without its parent, it is to end."""
    if member is not None and member.is_orphan:
        stop.set()
    health.beat()


def _supervise(
    options: dict[str, Any], output: Output, health: Health, stop: Stop, deadline: float | None
) -> None:
    """Start the workers, and wait for them."""

    def died(number: int, how: str) -> None:
        who = f"{label(health.names)}, worker {number}"
        log(logging.ERROR, "%s: %s", who, how)
        output.trouble(who, how)

    connections.close_all()  # until the workers have ended
    restarts = options["watch"] is not None
    with Monitor(health.beat):
        codes = Supervisor(
            options["workers"], stop, died, restarts=restarts, deadline=deadline
        ).run()
    if worst := max(codes.values()):
        said = ", ".join(f"worker {n} with {code}" for n, code in codes.items() if code)
        raise CommandError(f"ended with an exit code: {said}.", returncode=worst)


@dataclass(slots=True)
class _Work:
    """The runs of this process: one of each processor, or those of a watch.

    ``deadline``: when no row is to start any more, by the steady clock. ``failed``: the rows that
    failed for good; ``broken``: what did not run to its end; ``said``: when a trouble was reported.
    """

    options: dict[str, Any]
    output: Output
    health: Health
    stop: Stop
    deadline: float | None
    failed: int = 0
    broken: list[str] = field(default_factory=list)
    said: dict[str, float] = field(default_factory=dict)

    def do(self, processors: list[BatchProcessor[Any]]) -> None:
        """Run those of the processors that their checks do not refuse, in random order."""
        refused = refusals(processors)
        for name, why in refused.items():
            self.output.trouble(name, why)
            self.broken.append(name)
        fit = [each for each in processors if each.name not in refused]
        if self.options["all"]:
            # In the same order a backlog of the first one would use up each run's --timeout, and
            # those behind it would never be run.
            random.shuffle(fit)
        if self.options["watch"] is None:
            self._run_each(fit)
        else:
            self._watch(fit)
        if self.failed or self.broken:
            rows = [f"{printing.rows(self.failed)} failed"] * bool(self.failed)
            runs = [f"{' and '.join(self.broken)} did not run to the end"] * bool(self.broken)
            raise CommandError(f"{'; '.join(rows + runs)}.")

    def _run_each(self, processors: list[BatchProcessor[Any]]) -> None:
        for processor in processors:
            if self.stop.is_set():
                break
            try:
                self._run(processor)
            except Exception as error:  # noqa: BLE001  # the next processor is still to be run
                trouble = Trouble.of(error, processor, self.options["using"])
                close_old_connections()
                report = trouble.report or Report(name=processor.name, stopped="failures")
                self._ended(report, trouble.sentence)

    def _run(self, processor: BatchProcessor[Any]) -> None:
        using, limit = self.options["using"], self.options["limit"]
        if self.options["dry_run"]:
            found = processor.dry_run(using=using, limit=limit)
            self.output.answer(found.as_dict(), [str(found)])
            return
        report = processor.run(
            using=using,
            limit=limit,
            timeout=None if self.deadline is None else max(0.0, self.deadline - time.monotonic()),
            concurrency=self.options["concurrency"],
            stop=self.stop,
        )
        trouble = None if report.error is None else Trouble.of_resource(report.error)
        self._ended(report, "" if trouble is None else trouble.sentence)

    def _ended(self, report: Report, trouble: str) -> None:
        self.output.report(report, trouble)
        self.failed += report.failed - report.to_retry  # those to be retried do not count yet
        if trouble:
            self.broken.append(report.name)

    def _watch(self, processors: list[BatchProcessor[Any]]) -> None:
        """Watch until a signal, or the end that the options set; failed rows do not end it."""
        plan = Plan(
            interval=self.options["watch"],
            using=self.options["using"],
            limit=self.options["limit"],
            concurrency=self.options["concurrency"],
            deadline=self.deadline,
            listen=self.options["listen"],
        )
        if not Watch(processors, plan, self.stop, self._tell).run():
            self.broken += self.health.troubles

    def _tell(self, name: str, news: Event) -> None:
        """Write the news of a watch: a trouble once, and again while it lasts."""
        troubles, now = self.health.troubles, time.monotonic()
        match news:
            case Report():
                self.output.report(news)
            case Trouble(sentence=why):
                if troubles.get(name) != why or now - self.said[name] >= AGAIN_AFTER:
                    troubles[name], self.said[name] = why, now
                    log(logging.ERROR, "%s: %s", name, why)
                    self.output.trouble(name, why)
            case Recovered():
                del troubles[name]
                log(logging.WARNING, "%s: %s", name, "runs again")
                self.output.trouble(name, "runs again")
