"""What is wrong with a command line, in one sentence, and what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from django.core.management.base import CommandError, CommandParser

from . import conditions
from .choosing import USAGE_ERROR

#: How like an option has to be to be suggested: another one may do something else.
LIKENESS = 0.75

#: The option with which Nagios reads the answer: 2 would be CRITICAL.
NAGIOS = "--nagios"


class OneSentenceParser(CommandParser):
    """A parser whose errors are one sentence, without the list of all options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: The parsers of the actions, by name; empty in the parser of an action.
        self.actions: Mapping[str, argparse.ArgumentParser] = {}
        #: The parsers of all actions, in each of them.
        self.siblings: Mapping[str, argparse.ArgumentParser] = {}
        self._given: Sequence[str] = ()

    # The overloads of the type are for namespaces of other classes, which Django does not use.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse, and refuse what is not known: the parser of the command would not name it."""
        self._given = [] if args is None else [*args]
        found, more = super().parse_known_args(args, namespace)
        if more:
            self.error(f"expected no more arguments, got {more[0]!r}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """End with the sentence, as Django ends with an error of a command."""
        sentence = self._unknown_action(message) or self._unknown_option()
        sentence = sentence or f"{message.rstrip('.')}; see {self.prog} --help."
        if NAGIOS in self._given:
            print(conditions.line(conditions.UNKNOWN, sentence))  # there is no output yet
            self.exit(conditions.UNKNOWN)
        if self.called_from_command_line:
            self.exit(USAGE_ERROR, f"CommandError: {sentence}\n")
        raise CommandError(sentence, returncode=USAGE_ERROR)

    def _unknown_option(self) -> str:
        """Return a sentence about the first option that does not exist; empty: all exist."""
        options = _options(self)
        for given in self._given:
            name = given.partition("=")[0]
            if given == "--" or given in self.actions:
                break  # what follows is no option, or is for another parser
            # A beginning of an option stands for it.
            if name.startswith("--") and not any(each.startswith(name) for each in options):
                return f"expected an option of {self.prog}, got {name!r}; {self._meant(name)}"
        return ""

    def _meant(self, name: str) -> str:
        for action, parser in [("", self), *self.siblings.items()]:
            for close in difflib.get_close_matches(name, _options(parser), 1, LIKENESS):
                return f"{close} is an option of {action}." if action else f"did you mean {close}?"
        return f"see {self.prog} --help."

    def _unknown_action(self, message: str) -> str:
        """Return a sentence about an action that does not exist; empty: that is not the error."""
        found = re.match(r"argument ACTION: invalid choice: '(.*?)'", message)
        if found is None:
            return ""
        close = difflib.get_close_matches(found[1], self.actions, n=1)
        guess = f"; did you mean {close[0]}?" if close else "."
        return f"expected an action, one of {', '.join(self.actions)}, got {found[1]!r}{guess}"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    actions = parser._actions  # noqa: SLF001  # as Django's call_command() reads them
    return [name for each in actions for name in each.option_strings if name.startswith("--")]
