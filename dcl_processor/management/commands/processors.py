"""``manage.py processors``: run processors, and list them."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.management.color import no_style
from django.db import close_old_connections, connections

from dcl_processor import backlog, diagnosis, registry
from dcl_processor.diagnosis import Trouble
from dcl_processor.exceptions import ProcessorError, UnknownProcessor
from dcl_processor.management import watching
from dcl_processor.management.output import Output
from dcl_processor.processes import pool
from dcl_processor.processes.child import refuse_import
from dcl_processor.processes.console_log import quiet_unless_configured
from dcl_processor.processes.graceful_stop import Stop, StoppedAtOnce, polite_stop
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

USAGE_ERROR = 2


class Command(BaseCommand):
    help = "Run batch processors, or list them with the number of their pending rows."

    # A run itself verifies what it needs. The checks of the whole project, and their warnings, are
    # not for a command that cron starts every minute and whose output cron mails.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        common = _base_options()
        actions = parser.add_subparsers(dest="action", required=True, metavar="run | list")
        run = actions.add_parser(
            "run", parents=[common], help="Handle the rows that are pending now."
        )
        run.add_argument("names", nargs="*", metavar="NAME", help="Processors to run, in order.")
        run.add_argument("--all", action="store_true", help="Run all processors.")
        run.add_argument(
            "--limit",
            type=_rows,
            metavar="ROWS",
            help="Maximum number of rows to try, for each processor; with --watch, in each run.",
        )
        run.add_argument(
            "--max-failures",
            type=_failures,
            metavar="ROWS",
            help="Number of failed rows, one after the other or not, after which no row starts, "
            "for each processor; with --watch, in each run.",
        )
        run.add_argument(
            "--timeout",
            type=_seconds,
            metavar="SECONDS",
            help="Seconds after which no row starts, for all processors; with --watch, per run.",
        )
        run.add_argument(
            "--copies",
            type=_processes,
            default=1,
            metavar="N",
            help="Worker processes on this machine that share the rows, and the limit.",
        )
        run.add_argument(
            "--concurrency",
            type=_handlers,
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
            "--wait-for-slot",
            type=_seconds,
            default=0.0,
            metavar="SECONDS",
            help="Seconds to wait for a slot of a processor whose max_workers are at work; without "
            "it, the command leaves the rows to them.",
        )
        watching.add_arguments(run)
        listing = actions.add_parser(
            "list", parents=[common], help="Show the number of pending rows of each processor."
        )
        for action in (run, listing):
            action.add_argument(
                "--using",
                choices=tuple(connections),
                help="The database alias, instead of the processors' own.",
            )
            action.add_argument("--json", action="store_true", help="Print only JSON to stdout.")

    def handle(self, *_: Any, action: str, **options: Any) -> None:
        refuse_import()
        output = Output(
            self.stdout,
            self.stderr,
            as_json=options["json"],
            verbosity=options["verbosity"],
            tracebacks=options["traceback"] or options.get("tracebacks", False),
            color=self._has_color(options),
        )
        try:
            if action == "list":
                self.list_backlogs(output, options["using"])
            else:
                self.run_chosen(output, options)
        finally:
            output.close()

    def _has_color(self, options: dict[str, Any]) -> bool:
        """Return whether colours are wanted; if not, switch off Django's colours."""
        unwanted = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        if unwanted and not options["force_color"]:
            self.style = no_style()
            self.stderr.style_func = None
            return False
        return not options["no_color"]

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
        chosen = _choose(options["names"], run_all=options["all"])
        left_out = registry.broken() if options["all"] else []
        output.left_out(left_out)
        if options["dry_run"]:
            self.dry_run_each(chosen, output, options, left_out)
            return
        try:
            with quiet_unless_configured(), polite_stop(output.stopping) as stop:
                if options["watch"] is None:
                    self.run_each(chosen, output, stop, options, left_out)
                else:
                    watching.watch(chosen, output, stop, options)
                    if left_out:
                        raise CommandError(_summary(0, [each.app for each in left_out], lost=False))
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
        stop: Stop,
        options: dict[str, Any],
        left_out: Sequence[registry.Broken] = (),
    ) -> None:
        """Run one processor after the other; an error of one costs the others nothing."""
        using, limit, timeout = options["using"], options["limit"], options["timeout"]
        end = None if timeout is None else time.monotonic() + timeout
        failed, broken = 0, [each.app for each in left_out]
        for processor in chosen:
            if stop.is_set():
                break
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                with output.watching(processor, stop, using=using, limit=limit) as on_row:
                    report, copies = pool.run(
                        processor,
                        copies=options["copies"],
                        using=using,
                        limit=limit,
                        max_failures=options["max_failures"],
                        timeout=left,
                        wait_for_slot=options["wait_for_slot"],
                        concurrency=options["concurrency"],
                        stop=stop,
                        on_row=on_row,
                    )
            except Exception as error:  # noqa: BLE001  # the next processor is still to be run
                trouble = Trouble.of(error, processor, using)
                output.broke(processor.name, trouble)
                close_old_connections()
                broken.append(processor.name)
                failed += 0 if trouble.report is None else _failed(trouble.report)
                continue
            output.report(report, copies)
            failed += _failed(report)
            if report.error is not None or not all(isinstance(copy, Report) for copy in copies):
                broken.append(processor.name)
        if failed or broken or output.lost:
            raise CommandError(_summary(failed, broken, lost=bool(output.lost)))

    def dry_run_each(
        self,
        chosen: Sequence[BatchProcessor[Any]],
        output: Output,
        options: dict[str, Any],
        left_out: Sequence[registry.Broken],
    ) -> None:
        """Show what a run of each processor would do, or why it could not be made."""
        broken = [each.app for each in left_out]
        for processor in chosen:
            try:
                found = processor.dry_run(using=options["using"], limit=options["limit"])
            except Exception as error:  # noqa: BLE001  # the others are still to be shown
                output.broke(processor.name, Trouble.of(error, processor, options["using"]))
                close_old_connections()
                broken.append(processor.name)
            else:
                output.dry_run(found)
        if broken or output.lost:
            raise CommandError(_summary(0, broken, lost=bool(output.lost)))

    def list_backlogs(self, output: Output, using: str | None) -> None:
        """Show every processor with its pending rows, and its trouble, if any."""
        found: list[tuple[BatchProcessor[Any], int | None]] = []
        troubles: list[tuple[str, Trouble]] = []
        for processor in _choose([], run_all=True):
            try:
                found.append((processor, backlog.count(processor, using=using)))
            except Exception as error:  # noqa: BLE001  # the others can still be counted
                found.append((processor, None))
                troubles.append((processor.name, Trouble.of(error, processor, using)))
                close_old_connections()
        output.backlogs(found)
        # A database that is down is a trouble of all its processors: write it once.
        names: dict[str, list[str]] = {}
        for name, trouble in troubles:
            names.setdefault(trouble.sentence, []).append(name)
        for sentence, trouble in {each.sentence: each for _, each in troubles}.items():
            output.trouble(", ".join(names[sentence]), trouble)
        left_out = registry.broken()
        output.left_out(left_out)
        if troubles:
            number = f"{len(troubles)} of {len(found)}"
            raise CommandError(f"the pending rows of {number} processors could not be counted.")
        if left_out or output.lost:
            raise CommandError(_summary(0, [each.app for each in left_out], lost=bool(output.lost)))


def _choose(names: Sequence[str], *, run_all: bool) -> list[BatchProcessor[Any]]:
    try:
        if bool(names) == run_all:
            got = "both" if names else "neither"
            known = ", ".join(registry.processors()) or "none"
            raise CommandError(
                f"expected names of processors or --all, got {got}; the processors are {known}.",
                returncode=USAGE_ERROR,
            )
        chosen = registry.get(names) if names else list(registry.processors().values())
    except UnknownProcessor as error:
        # It may be a processor of an app that is left out, and then the name is right.
        code = 1 if registry.broken() else USAGE_ERROR
        raise CommandError(str(error), returncode=code) from error
    except ProcessorError as error:
        raise CommandError(str(error)) from error
    if not chosen and not registry.broken():
        raise CommandError(
            "expected a processor in the processors.py of an app in INSTALLED_APPS, got none.",
            returncode=USAGE_ERROR,
        )
    return chosen


def _failed(report: Report) -> int:
    """Return how many rows failed for good; rows to be retried do not count yet."""
    return report.failed - report.retried


def _summary(failed: int, broken: Sequence[str], *, lost: bool) -> str:
    rows = [f"{failed} row{'s' if failed > 1 else ''} failed"] if failed else []
    runs = [f"{' and '.join(broken)} did not run to the end"] if broken else []
    output = ["output could not be written"] if lost else []
    return "; ".join(rows + runs + output) + "."


def _base_options() -> CommandParser:
    """Return Django's own options for the actions, which accept only the options they define.

    No option has a default, so that the same option before the action keeps its value.
    """
    options = CommandParser(add_help=False, argument_default=argparse.SUPPRESS)
    options.add_argument(
        "-v",
        "--verbosity",
        type=int,
        choices=range(4),
        help="0: errors only; 2: tracebacks, and a watch's spare process, too.",
    )
    options.add_argument(
        "--traceback",
        action="store_true",
        # Django's own option would show, for a failed row, a traceback of this command.
        dest="tracebacks",
        help="Show the traceback of each failure.",
    )
    # Django reads these before it loads the command.
    options.add_argument("--settings", help=argparse.SUPPRESS)
    options.add_argument("--pythonpath", help=argparse.SUPPRESS)
    options.add_argument("--no-color", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--force-color", action="store_true", help=argparse.SUPPRESS)
    return options


def _rows(text: str) -> int:
    return _whole(text, 0, "a number of rows from 0")


def _failures(text: str) -> int:
    return _whole(text, 1, "a number of rows from 1")


def _processes(text: str) -> int:
    most = pool.MOST_COPIES
    return _whole(text, 1, f"a number of processes from 1 to {most}", most)


def _handlers(text: str) -> int:
    return _whole(text, 1, "a number of handlers from 1")


def _whole(text: str, least: int, words: str, most: float = math.inf) -> int:
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 0, got {text!r}")
    return seconds
