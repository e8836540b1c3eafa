"""``manage.py processors``: run processors, and show and change what waits or is stuck."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from dcl_processor.management import acting, asking, controlling, running
from dcl_processor.management.command_line import OneSentenceParser, base_options
from dcl_processor.management.output import Output

#: The actions in the order of the help, by name.
_ALL: list[Any] = [running, *asking.ACTIONS, *acting.ACTIONS, *controlling.ACTIONS]
ACTIONS: dict[str, Any] = {each.NAME: each for each in _ALL}


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
        common = base_options()
        parsers = parser.add_subparsers(
            dest="action", required=True, metavar="ACTION", parser_class=OneSentenceParser
        )
        for name, action in ACTIONS.items():
            of_action = parsers.add_parser(name, parents=[common], help=action.HELP)
            action.add_arguments(of_action)
            of_action.add_argument(
                "--using",
                choices=tuple(connections),
                help="The database alias, instead of the processors' own.",
            )
            of_action.add_argument("--json", action="store_true", help="Print only JSON to stdout.")

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
            ACTIONS[action].handle({**options, "owns_process": self._owns_process}, output)
            if output.lost:
                code = getattr(ACTIONS[action], "lost", 1)
                raise CommandError("output could not be written.", returncode=code)
        finally:
            output.close()
