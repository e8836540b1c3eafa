"""``processors run``: what is pending now, or, with ``--watch``, what becomes pending."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections, connections

from dcl_processor.checks import refusals
from dcl_processor.exceptions import ProcessorError
from dcl_processor.management import printing
from dcl_processor.management.command_line import (
    Subcommand,
    add_names_or_all,
    add_using,
    choose,
    duration,
    misuse,
    whole,
)
from dcl_processor.management.output import Output, show_operations
from dcl_processor.operator import registry
from dcl_processor.operator.actions import doubts
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described
from dcl_processor.report.log import log
from dcl_processor.report.report import Report
from dcl_processor.workers.health import Health, Monitor, Notifier
from dcl_processor.workers.notify import aliases, check_can_listen
from dcl_processor.workers.stopping import Stop, polite_stop, workers_stop
from dcl_processor.workers.supervisor import (
    MOST_WORKERS,
    Membership,
    Supervisor,
    label,
    name_sessions,
    same_command,
)
from dcl_processor.workers.watch import Event, Plan, Recovered, Watch

#: Seconds between two looks of a watch: the default, and the minimum.
INTERVAL, SHORTEST_INTERVAL = 5.0, 0.1

#: Seconds after which a trouble that lasts is reported again.
AGAIN_AFTER = 600.0


def _add_arguments(parser: CommandParser) -> None:
    add_names_or_all(parser, "Run all processors, in random order.")
    add = parser.add_argument
    text = "Maximum number of rows to try, for each processor and worker; of a watch, in each run."
    add("--limit", type=whole(0), metavar="ROWS", help=text)
    text = "Time after which no row starts, for all processors; a watch ends."
    add("--timeout", type=duration(), metavar="TIME", help=text)
    text = "Worker processes on this machine, each of which runs this command."
    add("--workers", type=whole(1, MOST_WORKERS), default=1, metavar="N", help=text)
    text = "Handlers at once in each worker, instead of the processors' own concurrency."
    add("--concurrency", type=whole(1), metavar="N", help=text)
    text = "Write this file each second while the command is alive."
    # A handler may change the working directory.
    add("--health-file", type=lambda path: Path(path).absolute(), metavar="PATH", help=text)
    text = "With --watch: look at once when wake() is called; PostgreSQL only."
    add("--listen", action="store_true", help=text)
    add_using(parser)
    add = parser.add_mutually_exclusive_group().add_argument
    text = f"Keep running, and look for rows at this interval (default: {INTERVAL:g} s)."
    how: dict[str, Any] = {"nargs": "?", "const": INTERVAL, "metavar": "TIME"}
    add("--watch", type=duration(SHORTEST_INTERVAL), help=text, **how)
    text = "Show what a run would do; call no handler, and change nothing."
    add("--dry-run", action="store_true", help=text)


def _chosen(options: dict[str, Any]) -> list[BatchProcessor[Any]]:
    """Return the processors that are to be run, in their order; refuse what they cannot have."""
    chosen = choose(options["names"])
    try:
        if options["workers"] > 1:
            same_command()
        if options["listen"]:
            for each in {*aliases(chosen, options["using"]).values()}:
                check_can_listen(each)
            if options["watch"] is None:
                raise misuse("expected --watch beside --listen, got --listen alone; add --watch.")
    except ProcessorError as error:
        raise misuse(str(error)) from error
    if options["all"]:
        # In the same order a backlog of the first one would use up each run's --timeout, and those
        # behind it would never be run.
        random.shuffle(chosen)
    return chosen


def _handle(options: dict[str, Any], output: Output) -> None:
    """Run the chosen processors, until their end or a signal."""
    # The variables of a program that calls the command are its own.
    environment = os.environ if options["owns_process"] else dict[str, str]()
    if options["owns_process"]:
        show_operations()
    member = Membership.taken_from(environment)
    chosen = _chosen(options)
    with (
        polite_stop(output.stopping) if member is None else workers_stop() as stop,
        _shown([each.name for each in chosen], options, environment, stop, member) as health,
    ):
        command = _Command(
            output=output, options=options, chosen=chosen, member=member, health=health, stop=stop
        )
        command.leave_out()
        if options["workers"] > 1 and member is None:
            command.supervise()
        else:
            command.work()


@contextmanager
def _shown(
    names: Sequence[str],
    options: dict[str, Any],
    environment: MutableMapping[str, str],
    stop: Stop,
    member: Membership | None,
) -> Iterator[Health]:
    """Show the health of this process in the block; at its end, remove the file."""
    file = options["health_file"] if member is None else None  # which the parent writes
    notifier = Notifier.taken_from(environment)
    health = Health(names, stop.is_set, file, notifier)
    try:
        health.ready()
    except OSError as error:
        raise misuse(
            f"expected --health-file to name a file that can be written, got {file}: "
            f"{described(error)}; create its folder, or choose another."
        ) from error
    try:
        yield health
    finally:
        health.close()


@dataclass(slots=True, kw_only=True)
class _Command:
    """One command, as the parent of its workers, as one of them, or as the only one.

    ``broken``: what did not run to its end. ``deadline``: when no row is to start any more, by the
    steady clock, which processes share.
    """

    output: Output
    options: dict[str, Any]
    chosen: list[BatchProcessor[Any]]
    member: Membership | None
    health: Health
    stop: Stop
    broken: list[str] = field(default_factory=list)
    deadline: float | None = None

    def __post_init__(self) -> None:
        began = time.monotonic() if self.member is None else self.member.began
        if self.options["timeout"] is not None:
            self.deadline = began + self.options["timeout"]

    def leave_out(self) -> None:
        """Leave out what cannot be run; only one of several processes says so."""
        broken = registry.broken() if self.options["all"] else []
        refused = refusals(self.chosen)
        self.chosen = [each for each in self.chosen if each.name not in refused]
        self.broken += [*(each.app for each in broken), *refused]
        if self.member is None:
            self.output.left_out(broken)
            for name, sentence in refused.items():
                self.output.broke(name, Trouble(sentence))
            self._tell_of_doubts()
            if self.options["watch"] is not None:
                names = " and ".join(self.health.names)
                self.output.note(f"watching {names} (process {os.getpid()})")

    def _tell_of_doubts(self) -> None:
        """Write how many rows are in doubt, which no run mentions any more."""
        for each in self.chosen:
            number, sentence = doubts(each, self.options["using"])
            if number:
                self.output.error(f"{each.name}: {sentence}")

    # --- several workers

    def supervise(self) -> None:
        """Start the workers, and wait for them."""
        connections.close_all()  # until the workers have ended
        with Monitor(self.health.beat):
            codes = Supervisor(
                self.options["workers"],
                self.stop,
                self._died,
                restarts=self.options["watch"] is not None,
                deadline=self.deadline,
            ).run()
        if worst := max(codes.values()):
            said = ", ".join(f"worker {n} with {code}" for n, code in codes.items() if code)
            raise CommandError(f"ended with an exit code: {said}.", returncode=worst)

    def _died(self, number: int, how: str) -> None:
        who = f"{label(self.health.names)}, worker {number}"
        log(logging.ERROR, "%s: %s", who, how)
        self.output.broke(who, Trouble(how))

    # --- this process's own work

    def work(self) -> None:
        """Run the processors, or watch them, as a process that shows that it is alive."""
        is_own, member = self.options["owns_process"], self.member
        number = [] if member is None else [member.number, self.options["workers"]]
        if is_own:
            name_sessions(label(self.health.names, *number))
        with Monitor(self._beat, may_end=is_own):
            failed = self._run_each() if self.options["watch"] is None else self._watch()
        if failed or self.broken:
            rows = [f"{printing.rows(failed)} failed"] * bool(failed)
            runs = [f"{' and '.join(self.broken)} did not run to the end"] * bool(self.broken)
            raise CommandError(f"{'; '.join(rows + runs)}.")

    def _beat(self) -> None:
        if self.member is not None and self.member.is_orphan:
            self.stop.set()
        self.health.beat()

    def _run_each(self) -> int:
        """Run one processor after the other, whatever the others do; return the failed rows."""
        failed, run = 0, self._dry_run if self.options["dry_run"] else self._run
        for processor in self.chosen:
            if self.stop.is_set():
                break
            report = Report(name=processor.name)
            try:
                report = run(processor)
            except Exception as error:  # noqa: BLE001  # the next processor is still to be run
                trouble = Trouble.of(error, processor, self.options["using"])
                close_old_connections()
                self._broke(processor.name, trouble)
                report = trouble.report or report
            failed += report.failed - report.to_retry  # those to be retried do not count yet
        return failed

    def _run(self, processor: BatchProcessor[Any]) -> Report:
        where = {"using": self.options["using"], "limit": self.options["limit"]}
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        how = {"timeout": left, "concurrency": self.options["concurrency"], "stop": self.stop}
        with self.output.bar(processor, **where):
            report = processor.run(**where, **how)
        if report.error is None:
            self.output.ran(report)
        else:
            trouble = Trouble.of_resource(report.error)
            self._broke(processor.name, replace(trouble, report=report))
        return report

    def _dry_run(self, processor: BatchProcessor[Any]) -> Report:
        found = processor.dry_run(using=self.options["using"], limit=self.options["limit"])
        self.output.result(found.as_dict(), str(found))
        return Report(name=processor.name)

    def _broke(self, name: str, trouble: Trouble) -> None:
        self.broken.append(name)
        self.output.broke(name, trouble)

    def _watch(self) -> int:
        """Watch until a signal, or the end that the options set; failed rows do not end it."""
        plan = Plan(
            interval=self.options["watch"],
            using=self.options["using"],
            limit=self.options["limit"],
            concurrency=self.options["concurrency"],
            deadline=self.deadline,
            listen=self.options["listen"],
        )
        news = _News(self.output, self.health.troubles)
        if not Watch(self.chosen, plan, self.stop, news.tell).run():
            self.broken += self.health.troubles
        return 0


class _News:
    """Writes the news of a watch: a trouble once, and again while it lasts.

    ``troubles``: why processors cannot be run, by their names.
    """

    def __init__(self, output: Output, troubles: dict[str, str]) -> None:
        self._output, self._troubles = output, troubles
        self._said: dict[str, float] = {}

    def tell(self, name: str, news: Event) -> None:
        now = time.monotonic()
        match news:
            case Report():
                self._output.ran(news)
            case Trouble(sentence=sentence):
                is_new = self._troubles.get(name) != sentence
                self._troubles[name] = sentence
                if is_new or now - self._said[name] >= AGAIN_AFTER:
                    self._said[name] = now
                    log(logging.ERROR, "%s: %s", name, sentence)
                    self._output.broke(name, replace(news, report=None))
            case Recovered():
                del self._troubles[name]
                log(logging.WARNING, "%s: %s", name, "runs again")
                self._output.trouble(name, Trouble("runs again"))


RUN = Subcommand("run", "Handle the rows that are pending now.", _add_arguments, _handle)
