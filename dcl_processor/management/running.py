"""``processors run``: what is pending now, or, with ``--watch``, what becomes pending."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db import close_old_connections, connections

from dcl_processor.checks import refusals
from dcl_processor.management.command_line import USAGE_ERROR
from dcl_processor.management.output import Output
from dcl_processor.management.run_options import add_arguments, chosen_by, refuse, rows_of
from dcl_processor.operator import registry
from dcl_processor.operator.actions import doubts
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.operator.times import span
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described
from dcl_processor.report.log import log
from dcl_processor.report.report import Report
from dcl_processor.workers.health import Health, Notifier
from dcl_processor.workers.monitor import Monitor
from dcl_processor.workers.stopping import Stop, polite_stop, workers_stop
from dcl_processor.workers.supervisor import Membership, Supervisor
from dcl_processor.workers.visible import label, named_sessions, quiet_unless_configured
from dcl_processor.workers.watch import Event, Plan, Recovered, Watch

__all__ = ["HELP", "NAME", "add_arguments", "handle"]

NAME = "run"
HELP = "Handle the rows that are pending now."

#: Seconds after which a trouble that lasts is reported again.
AGAIN_AFTER = 600.0


def handle(options: dict[str, Any], output: Output) -> None:
    """Run the chosen processors, until their end or a signal."""
    is_own = options["owns_process"]
    member = Membership.taken_from(os.environ) if is_own else None
    refuse(options)
    chosen = chosen_by(options)
    command = _Command(output, options, chosen, member)
    with (
        quiet_unless_configured(),
        _stop(output, member) as stop,
        _shown(command.names, options, stop, member) as health,
    ):
        if options["workers"] > 1 and member is None and not options["dry_run"]:
            command.supervise(health, stop)
            return
        work = label(command.names, *([member.number, options["workers"]] if member else []))
        with (
            named_sessions(work) if is_own else nullcontext(),
            Monitor(partial(_beat, health, stop, member), health.pace, may_end=is_own),
        ):
            command.work(health, stop)


def _stop(output: Output, member: Membership | None) -> Any:
    if member is not None:
        return workers_stop()
    return polite_stop(lambda stop: output.stopping(stop.cause))


@contextmanager
def _shown(
    names: Sequence[str], options: dict[str, Any], stop: Stop, member: Membership | None
) -> Iterator[Health]:
    """Show the health of this process in the block; at its end, remove the file."""
    path = options["health_file"]
    if member is not None:
        path = None if member.file is None else Path(member.file)
    # Only then systemd's variables are for this process.
    notifier = Notifier.taken_from(os.environ) if options["owns_process"] else None
    health = Health(names, stop.is_set, None if path is None else path.absolute(), notifier)
    try:
        health.ready()
    except OSError as error:
        raise CommandError(
            f"expected --health-file to name a file that can be written, got {path}: "
            f"{described(error)}; create its folder, or choose another.",
            returncode=USAGE_ERROR,
        ) from error
    try:
        yield health
    finally:
        health.close()


def _beat(health: Health, stop: Stop, member: Membership | None) -> None:
    if member is not None and member.is_orphan:
        stop.set()
    health.beat()


class _Command:
    """One command, as the parent of its workers, as one of them, or as the only one."""

    def __init__(
        self,
        output: Output,
        options: dict[str, Any],
        chosen: Sequence[BatchProcessor[Any]],
        member: Membership | None,
    ) -> None:
        self.output, self.options, self.member = output, options, member
        self.began = time.monotonic() if member is None else member.began
        self.names = [each.name for each in chosen]
        self.filter = rows_of(chosen, options)
        broken = {each.app: each for each in (registry.broken() if options["all"] else [])}
        refused = refusals(chosen)
        if member is None:  # once, and not by each worker
            output.left_out([*broken.values()])
            for name, sentence in refused.items():
                output.broke(name, Trouble(sentence))
        self.chosen = [each for each in chosen if each.name not in refused]
        self.left_out = [*broken, *refused] if member is None else []

    @property
    def watches(self) -> bool:
        return self.options["watch"] is not None

    def deadline(self, option: str) -> float | None:
        """Return when the seconds of an option are over, which count from the command's begin."""
        seconds = self.options[option]
        return None if seconds is None else self.began + seconds

    # --- several workers

    def supervise(self, health: Health, stop: Stop) -> None:
        """Start the workers, and wait for them."""
        self._begins()
        connections.close_all()  # until the workers have ended
        supervisor = Supervisor(
            self.options["workers"],
            health,
            stop,
            self._died,
            restarts=self.watches,
            deadline=self.deadline("max_runtime" if self.watches else "timeout"),
        )
        codes = supervisor.run()
        in_doubt = self._ends(stop)
        worst = max(codes.values())
        if worst == 0 and (self.left_out or in_doubt):
            raise CommandError(_summary(0, self.left_out, in_doubt))
        if worst:
            said = ", ".join(f"worker {n} with {code}" for n, code in codes.items() if code)
            raise CommandError(f"ended with an exit code: {said}.", returncode=worst)

    def _died(self, number: int, how: str) -> None:
        who = f"{label(self.names)}, worker {number}"
        log(logging.ERROR, "%s: %s", who, how)
        self.output.broke(who, Trouble(how, is_logged=True))

    def _begins(self) -> None:
        if self.watches and self.member is None:
            workers = self.options["workers"]
            several = f" with {workers} workers" if workers > 1 else ""
            names = " and ".join(self.names)
            self.output.lifecycle(f"watching {names}{several} (process {os.getpid()})")
            self._tell_of_doubts()

    def _ends(self, stop: Stop) -> int:
        """Tell of the end; return how many rows are in doubt, if that is to be a failure."""
        if self.member is not None:
            return 0
        if self.watches:
            how = f"stopped by {stop.cause}" if stop.is_set() else "ended"
            self.output.lifecycle(f"{how} after {span(time.monotonic() - self.began)}")
            return 0
        in_doubt = self._tell_of_doubts()
        return in_doubt if self.options["fail_in_doubt"] else 0

    def _tell_of_doubts(self) -> int:
        found = 0
        for each in self.chosen:
            number, sentence = doubts(each, self.options["using"])
            if number:
                self.output.trouble(each.name, Trouble(sentence))
            found += number
        return found

    # --- this process's own work

    def work(self, health: Health, stop: Stop) -> None:
        """Run the processors, or watch them."""
        if self.watches and self.chosen:
            self._begins()
            self._watch(health, stop)
        else:
            self._run_each(stop)

    @property
    def limit(self) -> int | None:
        """The rows that this worker may try."""
        limit: int | None = self.options["limit"]
        if limit is None or self.member is None:
            return limit
        workers: int = self.options["workers"]
        each, rest = divmod(limit, workers)
        return each + (self.member.number <= rest)

    def _run_each(self, stop: Stop) -> None:
        """Run one processor after the other; an error of one costs the others nothing."""
        failed, broken = 0, [*self.left_out]
        rows = {"filter": self.filter, "using": self.options["using"], "limit": self.limit}
        for processor, left in self._in_time(stop):
            try:
                if self.options["dry_run"]:
                    self.output.dry_run(processor.dry_run(**rows))
                    continue
                with nullcontext() if self.member else self.output.bar(processor, **rows):
                    report = processor.run(
                        **rows, timeout=left, concurrency=self.options["concurrency"], stop=stop
                    )
            except Exception as error:  # noqa: BLE001  # the next processor is still to be run
                trouble = Trouble.of(error, processor, self.options["using"])
                close_old_connections()
                self.output.broke(processor.name, trouble)
                broken.append(processor.name)
                failed += 0 if trouble.report is None else _failed(trouble.report)
                continue
            # Of rows that are named, it is said if they are not pending.
            self.output.report(report, always=self.options["pk"] is not None)
            failed += _failed(report)
            broken += [processor.name] if report.error is not None else []
        in_doubt = 0 if self.options["dry_run"] else self._ends(stop)
        if failed or broken or in_doubt:
            raise CommandError(_summary(failed, broken, in_doubt))

    def _in_time(self, stop: Stop) -> Iterator[tuple[BatchProcessor[Any], float | None]]:
        """Yield each processor with the seconds that are left; name those that are not begun."""
        end = self.deadline("timeout")
        for number, processor in enumerate(self.chosen):
            if stop.is_set():
                return
            left = None if end is None else max(0.0, end - time.monotonic())
            if left == 0:
                names = ", ".join(each.name for each in self.chosen[number:])
                line = f"the time of --timeout was up when these were not begun: {names}"
                self.output.lifecycle(line)
                return
            yield processor, left

    def _watch(self, health: Health, stop: Stop) -> None:
        """Watch until a signal, or the end that the options set; failed rows do not end it."""
        plan = Plan(
            interval=self.options["watch"],
            using=self.options["using"],
            limit=self.limit,
            timeout=self.options["timeout"],
            concurrency=self.options["concurrency"],
            deadline=self.deadline("max_runtime"),
            listen=self.options["listen"],
        )
        ran = Watch(self.chosen, plan, stop, _Log(self.output, health.troubles).tell).run()
        self._ends(stop)
        if not ran:
            names = " and ".join(each.name for each in self.chosen)
            raise CommandError(f"the watch has ended, because none can run: {names}.")
        if self.left_out:
            raise CommandError(_summary(0, self.left_out))


def _failed(report: Report) -> int:
    """Return how many rows failed for good; rows to be retried do not count yet."""
    return report.failed - report.to_retry


def _summary(failed: int, broken: Sequence[str], in_doubt: int = 0) -> str:
    rows = [f"{failed} row{'s' if failed > 1 else ''} failed"] if failed else []
    rows += [f"{in_doubt} row{'s are' if in_doubt > 1 else ' is'} in doubt"] if in_doubt else []
    runs = [f"{' and '.join(broken)} did not run to the end"] if broken else []
    return "; ".join(rows + runs) + "."


class _Log:
    """Writes the news of a watch: a cause once, and again while it lasts.

    ``troubles``: why processors cannot be run, by their names.
    """

    def __init__(self, output: Output, troubles: dict[str, str]) -> None:
        self._output, self._troubles = output, troubles
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def tell(self, name: str, news: Event) -> None:
        now = time.monotonic()
        match news:
            case Report():
                self._output.report(news, always=True)
            case Trouble(sentence=sentence):
                self._troubles[name] = sentence
                self._since.setdefault(name, now)
                if now - self._said.get(sentence, -AGAIN_AFTER) >= AGAIN_AFTER:
                    self._said[sentence] = now
                    log(logging.ERROR, "%s: %s", name, sentence)
                    self._output.broke(name, replace(news, report=None, is_logged=True))
            case Recovered():
                self._troubles.pop(name, None)
                left = set(self._troubles.values())
                self._said = {each: at for each, at in self._said.items() if each in left}
                words = f"runs again after {now - self._since.pop(name):.1f} s"
                log(logging.WARNING, "%s: %s", name, words)
                self._output.trouble(name, Trouble(words, is_logged=True))
