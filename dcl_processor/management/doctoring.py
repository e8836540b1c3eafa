"""``manage.py processors doctor``: what is wrong with the databases, tables and options."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandError

from dcl_processor import registry
from dcl_processor.errors import printable

from .choosing import NOT_FOUND_OUT, add_time_limit, choose
from .output import Output

HELP = "Examine what processors need of their databases, tables and options."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="Processors to examine; all by default."
    )
    parser.add_argument(
        "--fail-level",
        choices=("warning", "problem"),
        default="warning",
        help="The least finding that the exit code 1 stands for; a warning by default.",
    )
    add_time_limit(parser)


def handle(output: Output, options: dict[str, Any]) -> None:
    """Write the findings; raise ``CommandError`` if something is wrong, or was not found out."""
    from dcl_processor.insights.answer import Level
    from dcl_processor.insights.doctor import examine  # not for a run

    names = options["names"]
    chosen = choose(names, run_all=not names, left_out=NOT_FOUND_OUT)
    left_out = registry.broken()
    output.left_out(left_out)
    among = list(registry.processors().values())
    found = list(examine(chosen, among, using=options["using"], seconds=options["timeout"]))
    # A name in the database may be chosen by any of its roles, and must not forge a line.
    output.answer([each.as_dict() for each in found], (printable(str(each)) for each in found))
    levels = [each.level for each in found]
    bad = {Level.PROBLEM, Level.WARNING} if options["fail_level"] == "warning" else {Level.PROBLEM}
    if number := sum(level in bad for level in levels):
        raise CommandError(f"{number} of {len(found)} findings need attention.", returncode=1)
    if left_out or Level.UNKNOWN in levels:
        raise CommandError("not everything could be found out.", returncode=NOT_FOUND_OUT)
