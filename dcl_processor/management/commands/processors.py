"""``manage.py processors``: run processors, and show and change what waits or is stuck."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from dcl_processor.exceptions import ProcessorError
from dcl_processor.management import acting, asking, running
from dcl_processor.management.command_line import (
    add_name,
    add_names,
    add_names_or_all,
    add_question,
    misuse,
    unknown,
)
from dcl_processor.management.printing import Output
from dcl_processor.operator.diagnosis import describe
from dcl_processor.operator.states import NotRecordedError
from dcl_processor.report.errors import described

#: The actions in the order of the help: what handles each, and what adds its arguments.
ACTIONS: dict[str, tuple[Callable[..., None], tuple[Callable[..., None], ...]]] = {
    "run": (running.run, (running.add_run,)),
    "list": (asking.list_all, (add_question,)),
    "status": (asking.status, (add_names, asking.add_conditions, add_question)),
    "rows": (asking.rows, (add_name, asking.add_states, add_question)),
    "show": (asking.show, (add_name, asking.add_key, add_question)),
    "explain": (asking.explain, (add_name, add_question)),
    "doctor": (asking.doctor, (add_names, add_question)),
    "requeue": (acting.requeue, (add_name, acting.add_rows, add_question)),
    "mark-done": (acting.mark_done, (add_name, acting.add_rows, add_question)),
    "discard": (acting.discard, (add_name, acting.add_rows, acting.add_reason, add_question)),
    "pause": (acting.pause, (add_names_or_all, acting.add_reason, acting.add_end)),
    "resume": (acting.resume, (add_names_or_all,)),
    "history": (acting.history, (add_names,)),
}


class Command(BaseCommand):
    help = "Run batch processors, show what waits and what is stuck, and put it right."

    # A run itself verifies what it needs. The checks of the whole project, and their warnings, are
    # not for a command that cron starts every minute and whose output cron mails.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        # Whether this process is the command's own, and not that of a program that calls it.
        parser.set_defaults(owns_process=parser.called_from_command_line)
        parents = [_django_options()]
        parsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for name, (handle, arguments) in ACTIONS.items():
            of_action = parsers.add_parser(name, parents=parents, help=handle.__doc__)
            for add in arguments:
                add(of_action)
            formats = of_action.add_mutually_exclusive_group()
            for each in ("json", "csv") if name == "rows" else ("json",):
                what = f"Print only {each.upper()} to stdout."
                formats.add_argument(f"--{each}", action="store_true", help=what)

    def handle(self, *_: Any, action: str, **options: Any) -> None:
        output = Output(self.stdout, self.stderr, as_json=options["json"])
        handle, _ = ACTIONS[action]
        try:
            handle({**options, "action": action}, output)
        except CommandError:
            raise
        except (ProcessorError, NotRecordedError) as error:
            raise misuse(described(error)) from error
        except Exception as error:  # of a database, or of the user's code
            raise unknown(f"{describe(error)}.") from error


def _django_options() -> CommandParser:
    """Return options of Django's own, which may be written behind the action, too."""
    # Without a default, the same option before the action keeps its value.
    options = CommandParser(add_help=False, argument_default=argparse.SUPPRESS)
    hidden = argparse.SUPPRESS
    options.add_argument("-v", "--verbosity", type=int, choices=range(4), help=hidden)
    for name in ("--settings", "--pythonpath"):  # Django reads them before it loads the command
        options.add_argument(name, help=hidden)
    for name in ("--no-color", "--force-color", "--traceback"):
        options.add_argument(name, action="store_true", help=hidden)
    return options
