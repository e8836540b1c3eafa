"""The options of ``processors run``, and what they name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Q

from dcl_processor.exceptions import ProcessorError, Unsupported
from dcl_processor.management.command_line import (
    USAGE_ERROR,
    choose,
    keys,
    number_of_seconds,
    whole,
)
from dcl_processor.processor import BatchProcessor
from dcl_processor.workers.listener import aliases, check_can_listen
from dcl_processor.workers.supervisor import MOST_WORKERS, same_command

#: Seconds between two looks: the default, and the minimum.
INTERVAL, SHORTEST_INTERVAL = 5.0, 0.1


def add_arguments(parser: CommandParser) -> None:
    """Add the options of a run."""
    _add_rows(parser)
    _add_workers(parser)
    _add_watch(parser)


def _add_rows(parser: CommandParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="Processors to run, in order.")
    add(
        "--pk",
        nargs="+",
        action="extend",
        metavar="PK",
        help="Primary keys: run for these of the pending rows; needs one NAME.",
    )
    add("--all", action="store_true", help="Run all processors, in random order.")
    add(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="With --all: but not these.",
    )
    add(
        "--limit",
        type=whole("a number of rows from 0", 0),
        metavar="ROWS",
        help="Maximum number of rows to try, for each processor; with --watch, in each run.",
    )
    add(
        "--timeout",
        type=number_of_seconds("from 0", lambda seconds: seconds >= 0),
        metavar="SECONDS",
        help="Seconds after which no row starts, for all processors; with --watch, per run.",
    )


def _add_workers(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "--workers",
        type=whole(f"a number of processes from 1 to {MOST_WORKERS}", 1, MOST_WORKERS),
        default=1,
        metavar="N",
        help="Worker processes on this machine that share the rows, and the limit.",
    )
    add(
        "--concurrency",
        type=whole("a number of handlers from 1", 1),
        metavar="N",
        help="Handlers in flight at once, in each worker, instead of the processors' own "
        "concurrency: threads, or tasks for async handlers.",
    )
    add(
        "--dry-run",
        action="store_true",
        help="Show what a run would do; call no handler, and change nothing.",
    )
    add(
        "--fail-in-doubt",
        action="store_true",
        help="End with 1 if rows are in doubt: claimed long ago, and never settled.",
    )
    add(
        "--health-file",
        type=Path,
        metavar="PATH",
        help="Write this file each second while all workers are alive.",
    )


def _add_watch(parser: CommandParser) -> None:
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


def refuse(options: dict[str, Any]) -> None:
    """Raise for options that have no meaning together, or here."""
    if options["workers"] > 1 and not options["dry_run"]:
        try:
            same_command()
        except Unsupported as error:
            raise CommandError(str(error), returncode=USAGE_ERROR) from error
    if options["watch"] is not None:
        if options["dry_run"]:
            raise CommandError(
                "expected --dry-run for a single run, got --watch as well; leave --watch out to "
                "see what its next run would do.",
                returncode=USAGE_ERROR,
            )
        return
    for option, otherwise in (
        ("listen", "leave --listen out for a single run"),
        ("max_runtime", "use --timeout for a single run"),
    ):
        if options[option]:
            name = option.replace("_", "-")
            raise CommandError(
                f"expected --watch with --{name}, got --{name} alone; add --watch, or {otherwise}.",
                returncode=USAGE_ERROR,
            )


def chosen_by(options: dict[str, Any]) -> list[BatchProcessor[Any]]:
    """Return the processors that are to be run, in their order."""
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
        # In the same order a backlog of the first one would use up each run's --timeout, and those
        # behind it would never be run.
        random.shuffle(chosen)
    if options["listen"]:
        try:
            for each in sorted(set(aliases(chosen, options["using"]).values())):
                check_can_listen(each)
        except ProcessorError as error:
            raise CommandError(str(error), returncode=USAGE_ERROR) from error
    return chosen


def rows_of(chosen: Sequence[BatchProcessor[Any]], options: dict[str, Any]) -> Q | None:
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
