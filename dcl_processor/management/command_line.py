"""The parser of the command, and what its options name: processors, rows, times and values."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.core.management.base import CommandError, CommandParser
from django.db.models import JSONField, Model

from dcl_processor.exceptions import InvalidOption, ProcessorError, UnknownProcessor
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.times import parse_duration
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable
from dcl_processor.report.values import DAY

if TYPE_CHECKING:
    from dcl_processor.management.output import Output

#: Exit codes: rows failed, or were left; the command line is wrong; an answer could not be found.
FAILED, USAGE_ERROR, NOT_FOUND_OUT = 1, 2, 3

#: Seconds: the least time limit that all databases have, and that of a question by default.
SHORTEST, TIMEOUT = 0.001, 5.0


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One action of the command; ``lost``: its exit code if its output could not be written.

    ``handle()`` raises ``CommandError`` for each exit code but 0.
    """

    NAME: str
    HELP: str
    add_arguments: Callable[[CommandParser], None]
    handle: Callable[[dict[str, Any], Output], None]
    lost: int = FAILED


class OneSentenceParser(CommandParser):
    """A parser whose errors are one sentence, without the list of all options."""

    # The overloads of the type are for namespaces of other classes, which Django does not use.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse, and refuse what is not known: the parser of the command would not name it."""
        found, more = super().parse_known_args(args, namespace)
        if more:
            self.error(f"expected an argument or option of {self.prog}, got {more[0]!r}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """End with the sentence, as Django ends with an error of a command."""
        sentence = f"{message.rstrip('.')}; see {self.prog} --help."
        if self.called_from_command_line:
            self.exit(USAGE_ERROR, f"CommandError: {sentence}\n")
        raise misuse(sentence)


def misuse(sentence: str) -> CommandError:
    """Return the error of a wrong command line."""
    return CommandError(sentence, returncode=USAGE_ERROR)


def base_options() -> OneSentenceParser:
    """Return Django's own options for the actions, which accept only the options they define.

    No option has a default, so that the same option before the action keeps its value.
    """
    options = OneSentenceParser(add_help=False, argument_default=argparse.SUPPRESS)
    add, hidden = options.add_argument, argparse.SUPPRESS
    text = "0: errors only; 2: tracebacks, too."
    add("-v", "--verbosity", type=int, choices=range(4), help=text)
    # Django's own option would show, for a failed row, a traceback of this command.
    text = "Show the traceback of each failure."
    add("--traceback", action="store_true", dest="tracebacks", help=text)
    for name in ("--settings", "--pythonpath"):  # Django reads them before it loads the command
        add(name, help=hidden)
    for name in ("--no-color", "--force-color"):
        add(name, action="store_true", help=hidden)
    return options


# --- what options name


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the names of processors, which may be none."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="Processors; default: all.")


def named_or_all(
    names: Sequence[str],
) -> tuple[list[BatchProcessor[Any]], Sequence[registry.Broken]]:
    """Return the processors of these names; without names all, and the apps that have others."""
    return choose(names, run_all=not names), [] if names else registry.broken()


def choose(
    names: Sequence[str], *, run_all: bool = False, left_out: int = NOT_FOUND_OUT
) -> list[BatchProcessor[Any]]:
    """Return the processors of these names, or all; raise ``CommandError`` for an unknown name.

    ``left_out``: the exit code if the ``processors.py`` that may have the name cannot be imported.
    """
    try:
        if bool(names) == run_all:
            got, known = "both" if names else "neither", ", ".join(registry.processors())
            expected = "expected names of processors or --all"
            raise misuse(f"{expected}, got {got}; the processors are {known or 'none'}.")
        chosen = registry.get(names) if names else list(registry.processors().values())
    except ProcessorError as error:
        # It may be a processor of an app that is left out, and then the name is right.
        is_wrong = isinstance(error, UnknownProcessor) and not registry.broken()
        code = USAGE_ERROR if is_wrong else left_out
        raise CommandError(str(error), returncode=code) from error
    if not chosen and not registry.broken():
        expected = "expected a processor in the processors.py of an app in INSTALLED_APPS"
        raise misuse(f"{expected}, got none.")
    return chosen


def keys(
    processor: BatchProcessor[Any],
    texts: Iterable[str],
    *,
    using: str | None = None,
    unknown: int = NOT_FOUND_OUT,
) -> list[Any]:
    """Return primary keys; raise ``CommandError`` for a text that is none.

    ``unknown``: the exit code if ``pending``, which knows the model, raises an error.
    """
    from dcl_processor.insights import rows  # not for a run without keys

    try:
        # Apart from the parsing, because an error of the user's code may be a ValueError, too.
        model = rows.question_of(processor, using).model
    except Exception as error:
        code = USAGE_ERROR if isinstance(error, ProcessorError) else unknown
        raise CommandError(explain(error, processor, using), returncode=code) from error
    found = []
    for text in texts:
        try:
            found.append(rows.key_of(model, text))
        except (ValidationError, ValueError, TypeError) as error:
            expected = f"expected a primary key of the rows of {processor.name}"
            raise misuse(f"{expected}, got {text!r}: {_said(error)}") from error
    return found


def whole(words: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return the parser of an option that is a whole number; ``words``: which one."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
        return int(text)

    return parse


def number_of_seconds(
    words: str, fits: Callable[[float], bool], fix: str = ""
) -> Callable[[str], float]:
    """Return the parser of an option that is a number of seconds; ``words``: which ones fit."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (seconds < math.inf and fits(seconds)):
            expected = f"expected a number of seconds {words}"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}{fix}")
        return seconds

    return parse


def duration(text: str) -> float:
    """Parse an option that is a duration; a number alone is seconds."""
    try:
        return parse_duration(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def add_age(parser: Any, text: str) -> None:
    """Add ``--in-doubt``, which without an age is the least age."""
    text += ", such as 15m (default, and least: 60 s for each row of batch_size)."
    add = parser.add_argument
    add("--in-doubt", type=duration, nargs="?", const=0.0, metavar="OLDER", help=text)


def add_time_limit(parser: Any, *, default: float = TIMEOUT, besides: str = "") -> None:
    """Add ``--timeout`` for questions to the database; ``besides``: what else it limits."""
    text = f"Seconds that each question to the database may take{besides} (default: {default:g})."
    add = parser.add_argument
    add("--timeout", type=_time_limit, default=default, metavar="SECONDS", help=text)


def _time_limit(text: str) -> float:
    seconds = duration(text)
    if not SHORTEST <= seconds <= DAY:  # 0 would be no limit on some databases
        expected = f"expected a time limit from {SHORTEST:g} seconds to 1d"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return seconds


# --- values that a person typed, as the columns hold them


#: What a model, or a field of the user's own, raises for a name or a text that it cannot take.
_UNUSABLE = (FieldDoesNotExist, ValidationError, AttributeError, TypeError, ValueError)


def typed_values(model: type[Model], texts: Iterable[tuple[str, str]], of: str) -> dict[str, Any]:
    """Return the values by column; raise ``CommandError`` for one that its column cannot hold.

    ``of``: where they were expected.
    """
    values: dict[str, Any] = {}
    for name, text in texts:
        try:
            values[name] = _typed(model._meta.get_field(name), text)
        except _UNUSABLE as error:
            raise misuse(f"expected {of}, got {f'{name}={text}'!r}: {_said(error)}") from error
    return values


def _typed(field: Any, text: str) -> Any:
    while field.is_relation:
        field = field.target_field
    # A copy that is checked in full: Django skips the choices of a column that forms do not show,
    # and whether a text may be empty is a rule for forms.
    column = copy(field)
    column.editable = column.blank = True
    value = json.loads(text, cls=column.decoder) if isinstance(column, JSONField) else text
    return column.clean(value, None)


def _said(error: Exception) -> str:
    said = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
    return f"{printable(said).rstrip('.')}."
