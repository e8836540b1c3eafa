"""The parser of the command, whose errors are one sentence, and Django's own options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from django.core.management.base import CommandError, CommandParser

from . import conditions
from .choosing import USAGE_ERROR

#: The option with which Nagios reads the answer: 2 would be CRITICAL.
NAGIOS = "--nagios"


class OneSentenceParser(CommandParser):
    """A parser whose errors are one sentence, without the list of all options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._given: Sequence[str] = ()

    # The overloads of the type are for namespaces of other classes, which Django does not use.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse, and refuse what is not known: the parser of the command would not name it."""
        self._given = [] if args is None else [*args]
        found, more = super().parse_known_args(args, namespace)
        if more:
            self.error(f"expected an argument or option of {self.prog}, got {more[0]!r}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """End with the sentence, as Django ends with an error of a command."""
        sentence = f"{message.rstrip('.')}; see {self.prog} --help."
        if NAGIOS in self._given:
            print(conditions.line(conditions.UNKNOWN, sentence))  # there is no output yet
            self.exit(conditions.UNKNOWN)
        if self.called_from_command_line:
            self.exit(USAGE_ERROR, f"CommandError: {sentence}\n")
        raise CommandError(sentence, returncode=USAGE_ERROR)


def base_options() -> OneSentenceParser:
    """Return Django's own options for the actions, which accept only the options they define.

    No option has a default, so that the same option before the action keeps its value.
    """
    options = OneSentenceParser(add_help=False, argument_default=argparse.SUPPRESS)
    options.add_argument(
        "-v", "--verbosity", type=int, choices=range(4), help="0: errors only; 2: tracebacks, too."
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
