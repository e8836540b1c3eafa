"""``manage.py processors``: run processors, and show and change what waits or is stuck."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from dcl_processor.management import acting, asking, controlling, running
from dcl_processor.management.output import Output

#: The actions in the order of the help, by name.
_ALL = [running.RUN, *asking.ACTIONS, *acting.ACTIONS, *controlling.ACTIONS]
ACTIONS = {each.name: each for each in _ALL}


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

    def add_arguments(self, parser: CommandParser) -> None:
        parents = [_django_options()]
        parsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for each in ACTIONS.values():
            of_action = parsers.add_parser(each.name, parents=parents, help=each.help)
            each.add_arguments(of_action)
            formats = of_action.add_mutually_exclusive_group()
            for name in ("json", *each.formats):
                text = f"Print only {name.upper()} to stdout."
                formats.add_argument(f"--{name}", action="store_true", help=text)

    def handle(self, *_: Any, action: str, **options: Any) -> None:
        json, verbosity = options["json"], options["verbosity"]
        output = Output(self.stdout, self.stderr, as_json=json, verbosity=verbosity)
        ACTIONS[action].handle({**options, "owns_process": self._owns_process}, output)


def _django_options() -> CommandParser:
    """Return options of Django's own that may be written behind the action.

    No option has a default, so that the same option before the action keeps its value.
    """
    options = CommandParser(add_help=False, argument_default=argparse.SUPPRESS)
    add, hidden = options.add_argument, argparse.SUPPRESS
    text = "0: errors only; 2: tracebacks, too."
    add("-v", "--verbosity", type=int, choices=range(4), help=text)
    for name in ("--settings", "--pythonpath"):  # Django reads them before it loads the command
        add(name, help=hidden)
    for name in ("--no-color", "--force-color"):
        add(name, action="store_true", help=hidden)
    return options
