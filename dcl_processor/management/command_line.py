"""What options of the command name: processors, rows, times and values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.db.models import JSONField, Model

from dcl_processor.exceptions import InvalidOption, ProcessorError
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.times import parse_duration
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.management.output import Output

#: Exit codes: rows failed, or were left; the command line is wrong; an answer could not be found.
FAILED, USAGE_ERROR, NOT_FOUND_OUT = 1, 2, 3

#: Seconds: the time limit of a question to the database, unless an option says otherwise.
TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One action of the command; ``handle()`` raises ``CommandError`` for each exit code but 0.

    ``formats``: those of its answer besides JSON and lines for people.
    """

    name: str
    help: str
    add_arguments: Callable[[CommandParser], None]
    handle: Callable[[dict[str, Any], Output], None]
    formats: tuple[str, ...] = ()


def misuse(sentence: str) -> CommandError:
    """Return the error of a wrong command line."""
    return CommandError(sentence, returncode=USAGE_ERROR)


# --- processors


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the names of processors, which may be none."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="Processors; default: all.")


def add_names_or_all(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the names of processors, or ``--all``; ``text``: its help."""
    group = parser.add_mutually_exclusive_group(required=True)
    # Without a default, no name would count as a choice beside --all.
    group.add_argument("names", nargs="*", default=[], metavar="NAME", help="Processors.")
    group.add_argument("--all", action="store_true", help=text)


def choose(names: Sequence[str]) -> list[BatchProcessor[Any]]:
    """Return the processors of these names, or without names all of them."""
    broken = registry.broken()
    try:
        chosen = registry.get(names) if names else [*registry.processors().values()]
    except ProcessorError as error:
        # A processor.py that cannot be imported may have the name.
        code = NOT_FOUND_OUT if broken else USAGE_ERROR
        raise CommandError(str(error), returncode=code) from error
    if not chosen and not broken:
        expected = "expected a processor in the processors.py of an app in INSTALLED_APPS"
        raise misuse(f"{expected}, got none.")
    return chosen


def choose_and_left_out(
    names: Sequence[str],
) -> tuple[list[BatchProcessor[Any]], Sequence[registry.Broken]]:
    """Return the processors of these names; without names all, and the apps that have others."""
    return choose(names), [] if names else registry.broken()


# --- times and numbers


def duration(least: float = 0.0) -> Callable[[str], float]:
    """Return the parser of a duration in seconds: ``90``, ``90s``, ``15m``, ``2h``, ``1d``."""

    def parse(text: str) -> float:
        try:
            seconds = parse_duration(text)
        except InvalidOption as error:
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error
        if seconds < least:
            raise argparse.ArgumentTypeError(f"expected {least:g} s or more, got {text!r}")
        return seconds

    return parse


def whole(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return the parser of a whole number within these bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            expected = f"expected a whole number from {least} to {most:,}"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return int(text)

    return parse


def add_age(parser: Any, text: str) -> None:
    """Add ``--in-doubt``, which without an age is the least age."""
    text += ", such as 15m (default, and least: 60 s for each row of batch_size)."
    add = parser.add_argument
    add("--in-doubt", type=duration(), nargs="?", const=0.0, metavar="OLDER", help=text)


def add_question(parser: argparse.ArgumentParser) -> None:
    """Add what all questions to a processor's database have."""
    text = f"Time limit of each question to the database (default: {TIMEOUT:g})."
    parser.add_argument("--timeout", type=duration(), default=TIMEOUT, metavar="TIME", help=text)
    add_using(parser)


def add_using(parser: argparse.ArgumentParser) -> None:
    """Add the alias of another database."""
    text = "The database alias, instead of the processors' own."
    parser.add_argument("--using", choices=tuple(connections), help=text)


# --- rows, and values that a person typed, as the columns hold them


def keys(
    processor: BatchProcessor[Any], texts: Iterable[str], *, using: str | None = None
) -> list[Any]:
    """Return primary keys; raise ``CommandError`` for a text that is none."""
    from dcl_processor.insights import rows  # not for a run

    try:
        # Apart from the parsing, because an error of the user's code may be a ValueError, too.
        model = rows.question_of(processor, using).model
    except Exception as error:
        code = USAGE_ERROR if isinstance(error, ProcessorError) else NOT_FOUND_OUT
        raise CommandError(explain(error, processor, using), returncode=code) from error
    found = []
    for text in texts:
        try:
            found.append(rows.key_of(model, text))
        except (ValidationError, ValueError, TypeError) as error:
            expected = f"expected a primary key of the rows of {processor.name}"
            raise misuse(f"{expected}, got {text!r}: {_said(error)}") from error
    return found


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
