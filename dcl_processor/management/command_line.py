"""What options of the command name: processors, rows, times and values; and its exit codes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.core.management.base import CommandError
from django.db import connections
from django.db.models import JSONField, Model

from dcl_processor.exceptions import InvalidOption
from dcl_processor.insights.answer import TIMEOUT
from dcl_processor.insights.rows import key_of
from dcl_processor.operator import registry
from dcl_processor.operator.states import question_of
from dcl_processor.operator.times import parse_duration
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable

if TYPE_CHECKING:
    from dcl_processor.management.printing import Output


def misuse(sentence: str) -> CommandError:
    """Return the error of a wrong command line."""
    return CommandError(sentence, returncode=2)


def unknown(sentence: str) -> CommandError:
    """Return the error of an answer that could not be found out."""
    return CommandError(sentence, returncode=3)


# --- processors


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="A processor.")


def add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="Processors; default: all.")


def add_names_or_all(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    # Without a default, no name would count as a choice beside --all.
    group.add_argument("names", nargs="*", default=[], metavar="NAME", help="Processors.")
    group.add_argument("--all", action="store_true", help="All processors.")


def named(names: Sequence[str]) -> list[BatchProcessor[Any]]:
    """Return the processors of these names, or without names all of them."""
    return registry.get(names) if names else [*registry.processors().values()]


@contextmanager
def chosen(names: Sequence[str], output: Output) -> Iterator[list[BatchProcessor[Any]]]:
    """Yield the processors of these names, or without names all of them.

    Of all, some may be missing, because their app cannot be imported: stderr gets the reasons, and
    ``CommandError`` is raised at the end of the block.
    """
    broken = [] if names else registry.broken()
    for each in broken:
        output.error(str(each))
    found = named(names)
    if not (found or broken):
        expected = "expected a processor in the processors.py of an app in INSTALLED_APPS"
        raise misuse(f"{expected}, got none.")
    yield found
    if broken:
        left_out = " and ".join(each.app for each in broken)
        raise unknown(f"the processors of {left_out} cannot be imported.")


# --- times and databases


def duration(text: str) -> float:
    """Parse a duration in seconds: ``90``, ``90s``, ``15m``, ``2h``, ``1d``."""
    try:
        return parse_duration(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def add_age(parser: Any, text: str) -> None:
    """Add ``--in-doubt``, which without an age is the least age."""
    text += ", such as 15m (default, and least: 60 s for each row of batch_size)."
    add = parser.add_argument
    add("--in-doubt", type=duration, nargs="?", const=0.0, metavar="OLDER", help=text)


def add_question(parser: argparse.ArgumentParser) -> None:
    """Add what all questions to a processor's database have."""
    text = f"Time limit of each question to the database (default: {TIMEOUT:g})."
    parser.add_argument("--timeout", type=duration, default=TIMEOUT, metavar="TIME", help=text)
    add_using(parser)


def add_using(parser: argparse.ArgumentParser) -> None:
    text = "The database alias, instead of the processors' own."
    parser.add_argument("--using", choices=tuple(connections), help=text)


# --- rows, and values that a person typed, as the columns hold them


def keys(
    processor: BatchProcessor[Any], texts: Iterable[str], *, using: str | None = None
) -> list[Any]:
    """Return primary keys; raise ``CommandError`` for a text that is none."""
    model, found = question_of(processor, using).model, []
    for text in texts:
        try:
            found.append(key_of(model, text))
        except (ValidationError, ValueError, TypeError) as error:
            expected = f"expected a primary key of the rows of {processor.name}"
            raise misuse(f"{expected}, got {text!r}: {_said(error)}") from error
    return found


def typed_values(model: type[Model], texts: Iterable[tuple[str, str]], of: str) -> dict[str, Any]:
    """Return the values by column; raise ``CommandError`` for one that its column cannot hold.

    ``of``: where they were expected.
    """
    values: dict[str, Any] = {}
    for name, text in texts:
        try:
            column: Any = model._meta.get_field(name)
            is_json = isinstance(column, JSONField)
            value = json.loads(text, cls=column.decoder) if is_json else text
            values[name] = column.clean(value, None)
        except (FieldDoesNotExist, ValidationError, AttributeError, TypeError, ValueError) as error:
            raise misuse(f"expected {of}, got {f'{name}={text}'!r}: {_said(error)}") from error
    return values


def _said(error: Exception) -> str:
    said = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
    return f"{printable(said).rstrip('.')}."
