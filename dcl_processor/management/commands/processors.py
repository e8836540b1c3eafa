"""``manage.py processors``: run processors, and show and change what waits or is stuck."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import close_old_connections, connections
from django.db.models import Q

from dcl_processor.checks import refusals
from dcl_processor.management import (
    acting,
    controlling,
    explaining,
    metering,
    showing,
    status,
    watching,
)
from dcl_processor.management.command_line import (
    NOT_FOUND_OUT,
    USAGE_ERROR,
    OneSentenceParser,
    base_options,
    choose,
    keys,
    number_of_seconds,
    whole,
)
from dcl_processor.management.output import Output
from dcl_processor.operator import diagnosis, registry
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.pending import steady as time
from dcl_processor.processes import child, pool
from dcl_processor.processes.graceful_stop import Stop, StoppedAtOnce, polite_stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.visible import label, named_sessions, quiet_unless_configured
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.report import Report

#: Actions with a module of their own, each of which has ``HELP``, ``add_arguments(parser)`` and
#: ``handle(output, options)``; an ``Action`` writes to rows, and the others ask.
MODULES: dict[str, Any] = {
    "list": showing.LIST,
    "status": status,
    "show": showing.SHOW,
    "requeue": acting.REQUEUE,
    "mark-done": acting.MARK_DONE,
    "discard": acting.DISCARD,
    "pause": controlling.PAUSE,
    "resume": controlling.RESUME,
    "history": controlling.HISTORY,
    "explain": explaining.EXPLAIN,
    "doctor": explaining.DOCTOR,
}


#: The options that choose the rows of a run.
ROWS = ("filter", "using", "limit")


class Command(BaseCommand):
    help = "Run batch processors, show what waits and what is stuck, and put it right."

    # A run itself verifies what it needs. The checks of the whole project, and their warnings, are
    # not for a command that cron starts every minute and whose output cron mails.
    requires_system_checks = []

    #: Whether this process is the command's own, and not that of a program that calls the command.
    _owns_process = False

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as ``manage.py`` does, which ends with the command."""
        self._owns_process = True
        super().run_from_argv(argv)

    def execute(self, *arguments: Any, **options: Any) -> None:
        """Be a worker, if a command of this program has started this one as one."""
        if files := os.environ.pop(child.FILES, None):
            child.main(files)
        else:
            super().execute(*arguments, **options)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return Django's parser, with errors of one sentence."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        return OneSentenceParser(
            prog=parser.prog,
            description=parser.description,
            formatter_class=parser.formatter_class,
            parents=[parser],
            add_help=False,
            called_from_command_line=parser.called_from_command_line,
        )

    def add_arguments(self, parser: CommandParser) -> None:
        common, most = base_options(), pool.MOST_WORKERS
        actions = parser.add_subparsers(
            dest="action", required=True, metavar="ACTION", parser_class=OneSentenceParser
        )
        run = actions.add_parser(
            "run", parents=[common], help="Handle the rows that are pending now."
        )
        run.add_argument("names", nargs="*", metavar="NAME", help="Processors to run, in order.")
        run.add_argument(
            "--pk",
            nargs="+",
            action="extend",
            metavar="PK",
            help="Primary keys: run for these of the pending rows; needs one NAME.",
        )
        run.add_argument("--all", action="store_true", help="Run all processors, in random order.")
        run.add_argument(
            "--exclude",
            nargs="+",
            action="extend",
            default=[],
            metavar="NAME",
            help="With --all: but not these.",
        )
        run.add_argument(
            "--limit",
            type=whole("a number of rows from 0", 0),
            metavar="ROWS",
            help="Maximum number of rows to try, for each processor; with --watch, in each run.",
        )
        run.add_argument(
            "--timeout",
            type=number_of_seconds("from 0", lambda seconds: seconds >= 0),
            metavar="SECONDS",
            help="Seconds after which no row starts, for all processors; with --watch, per run.",
        )
        run.add_argument(
            "--workers",
            type=whole(f"a number of processes from 1 to {most}", 1, most),
            default=1,
            metavar="N",
            help="Worker processes on this machine that share the rows, and the limit.",
        )
        run.add_argument(
            "--concurrency",
            type=whole("a number of handlers from 1", 1),
            metavar="N",
            help="Handlers in flight at once, in each worker, instead of the processors' own "
            "concurrency: threads, or tasks for async handlers.",
        )
        run.add_argument(
            "--dry-run",
            action="store_true",
            help="Show what a run would do; call no handler, and change nothing.",
        )
        run.add_argument(
            "--fail-in-doubt",
            action="store_true",
            help="End with 1 if rows are in doubt: claimed long ago, and never settled.",
        )
        watching.add_arguments(run)
        metering.add_arguments(run)
        own = {
            name: actions.add_parser(name, parents=[common], help=module.HELP)
            for name, module in MODULES.items()
        }
        for name, module in MODULES.items():
            module.add_arguments(own[name])
        for action in (run, *own.values()):
            action.add_argument(
                "--using",
                choices=tuple(connections),
                help="The database alias, instead of the processors' own.",
            )
            action.add_argument("--json", action="store_true", help="Print only JSON to stdout.")

    def handle(self, *_: Any, action: str, **options: Any) -> None:
        output = Output(
            self.stdout,
            self.stderr,
            as_json=options["json"],
            verbosity=options["verbosity"],
            tracebacks=options["traceback"] or options.get("tracebacks", False),
            color=not options["no_color"],
        )
        try:
            if action in MODULES:
                MODULES[action].handle(output, options)
                if output.lost:
                    writes = isinstance(MODULES[action], acting.Action)
                    code = acting.LEFT if writes else NOT_FOUND_OUT
                    raise CommandError("output could not be written.", returncode=code)
            else:
                self.run_chosen(output, options)
        finally:
            output.close()

    def run_chosen(self, output: Output, options: dict[str, Any]) -> None:
        """Run the chosen processors, until their end or a signal."""
        if options["watch"] is None:
            watching.refuse_without_watch(options)
        elif options["dry_run"]:
            raise CommandError(
                "expected --dry-run for a single run, got --watch as well; leave --watch out to "
                "see what its next run would do.",
                returncode=USAGE_ERROR,
            )
        chosen = choose(options["names"], run_all=options["all"], left_out=1)
        if options["exclude"]:
            if not options["all"]:
                raise CommandError(
                    "expected --exclude beside --all, got names; leave --exclude out.",
                    returncode=USAGE_ERROR,
                )
            left_out = choose(options["exclude"], left_out=1)
            chosen = [each for each in chosen if each not in left_out]
        if options["all"]:
            # In the same order a backlog of the first one would use up each run's --timeout, and
            # those behind it would never be run.
            random.shuffle(chosen)
        # One name for all of them, because the session stays open from one to the next.
        work = label([processor.name for processor in chosen])
        with named_sessions(work) if self._owns_process else nullcontext():
            self._run_chosen(chosen, output, options)

    def _run_chosen(
        self, chosen: Sequence[BatchProcessor[Any]], output: Output, options: dict[str, Any]
    ) -> None:
        """Run them, or show what a run would do, or watch them."""
        some = _rows_of(chosen, options)
        broken = registry.broken() if options["all"] else []
        output.left_out(broken)
        left_out = [each.app for each in broken]
        for name, sentence in refusals(chosen).items():
            output.broke(name, Trouble(sentence))
            left_out.append(name)
        chosen = [each for each in chosen if each.name not in left_out]
        try:
            with (
                quiet_unless_configured(),
                metering.exported([each.name for each in chosen], options) as on_counts,
                polite_stop(output.stopping) as stop,
                metering.published(
                    [processor.name for processor in chosen],
                    stop,
                    options["health_file"],
                    owns_process=self._owns_process,
                ) as health,
            ):
                options = {**options, "filter": some, "on_counts": on_counts}
                if options["watch"] is None or not chosen:
                    self.run_each(chosen, output, health, options, left_out)
                else:
                    may_supervise = self._owns_process
                    watching.watch(chosen, output, health, options, may_supervise=may_supervise)
                    if left_out:
                        raise CommandError(_summary(0, left_out))
        except StoppedAtOnce as stopped:
            doubts = "".join(map(diagnosis.in_doubt, chosen))
            raise CommandError(
                f"stopped at once by {stopped}; uncommitted work is rolled back{doubts}.",
                returncode=128 + stopped.signum,
            ) from stopped

    def run_each(
        self,
        chosen: Sequence[BatchProcessor[Any]],
        output: Output,
        health: Health,
        options: dict[str, Any],
        left_out: Sequence[str] = (),
    ) -> None:
        """Run one processor after the other; an error of one costs the others nothing."""
        failed, broken, in_doubt = 0, [*left_out], 0
        for processor, left in _in_time(chosen, options["timeout"], health.stop, output):
            outcomes: Sequence[Report | Trouble]
            try:
                if options["dry_run"]:
                    output.dry_run(processor.dry_run(**{name: options[name] for name in ROWS}))
                    continue
                rest = {**options, "timeout": left}
                outcomes = self.run_one(processor, output, health, rest)
            except Exception as error:  # noqa: BLE001  # the next processor is still to be run
                outcomes = [Trouble.of(error, processor, options["using"])]
                close_old_connections()
            # Of rows that are named, it is said if they are not pending.
            always = options["pk"] is not None
            failed += _write_outcomes(output, processor.name, outcomes, broken, always=always)
            if any(isinstance(each, Report) for each in outcomes):
                in_doubt += status.tell_of_doubts(processor, output, options["using"])
        in_doubt = in_doubt if options["fail_in_doubt"] else 0
        if failed or broken or in_doubt or output.lost:
            raise CommandError(_summary(failed, broken, in_doubt, lost=bool(output.lost)))

    def run_one(
        self,
        processor: BatchProcessor[Any],
        output: Output,
        health: Health,
        options: dict[str, Any],
    ) -> Sequence[Report | Trouble]:
        """Run a processor; return what became of each of its workers."""
        which = {name: options[name] for name in ROWS}
        is_alone = options["workers"] == 1
        bar = output.watching(processor, health.stop, **which) if is_alone else nullcontext()
        with bar as on_row:
            return pool.run(
                processor,
                **which,
                workers=options["workers"],
                timeout=options["timeout"],
                concurrency=options["concurrency"],
                stop=health.stop,
                on_row=on_row,
                on_counts=options["on_counts"],
                health=health,
                may_supervise=self._owns_process,
            )


def _write_outcomes(
    output: Output,
    name: str,
    outcomes: Sequence[Report | Trouble],
    broken: list[str],
    *,
    always: bool,
) -> int:
    """Write what became of each worker; add those that are lost, and return the failed rows."""
    failed = 0
    for number, outcome in enumerate(outcomes, start=1):
        worker = number if len(outcomes) > 1 else None
        if isinstance(outcome, Trouble):
            output.broke(name, outcome, worker)
            report = outcome.report
        else:
            output.report(outcome, worker, always=always)
            report = outcome
        if isinstance(outcome, Trouble) or outcome.error is not None:
            broken.append(name if worker is None else f"{name} (worker {worker})")
        failed += 0 if report is None else _failed(report)
    return failed


def _in_time(
    chosen: Sequence[BatchProcessor[Any]], timeout: float | None, stop: Stop, output: Output
) -> Iterator[tuple[BatchProcessor[Any], float | None]]:
    """Yield each processor with the seconds that are left; name those that are not begun."""
    end = None if timeout is None else time.monotonic() + timeout
    for number, processor in enumerate(chosen):
        if stop.is_set():
            return
        left = None if end is None else max(0.0, end - time.monotonic())
        if left == 0:
            names = ", ".join(each.name for each in chosen[number:])
            output.lifecycle(f"the time of --timeout was up when these were not begun: {names}")
            return
        yield processor, left


def _rows_of(chosen: Sequence[BatchProcessor[Any]], options: dict[str, Any]) -> Q | None:
    """Return the condition for the rows that ``--pk`` names; ``None``: all pending rows."""
    if options["pk"] is None:
        return None
    if len(chosen) != 1 or options["watch"] is not None:
        got = "--watch" if options["watch"] is not None else f"{len(chosen)} processors"
        raise CommandError(
            f"expected --pk with one processor and a single run, got {got}; write the processor's "
            "name before --pk.",
            returncode=USAGE_ERROR,
        )
    return Q(pk__in=keys(chosen[0], options["pk"], using=options["using"], unknown=1))


def _failed(report: Report) -> int:
    """Return how many rows failed for good; rows to be retried do not count yet."""
    return report.failed - report.to_retry


def _summary(failed: int, broken: Sequence[str], in_doubt: int = 0, *, lost: bool = False) -> str:
    rows = [f"{failed} row{'s' if failed > 1 else ''} failed"] if failed else []
    rows += [f"{in_doubt} row{'s are' if in_doubt > 1 else ' is'} in doubt"] if in_doubt else []
    runs = [f"{' and '.join(broken)} did not run to the end"] if broken else []
    output = ["output could not be written"] if lost else []
    return "; ".join(rows + runs + output) + "."
