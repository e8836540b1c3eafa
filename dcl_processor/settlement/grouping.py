"""Group the rows that one flip statement can write.

Their values are the same, or they write the same columns, each row with values of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from django.db import connections

from dcl_processor.candidates.question import Question
from dcl_processor.compiled_sql import own_values
from dcl_processor.compiled_sql.cache import key_of_value
from dcl_processor.compiled_sql.own_values import OwnColumn, OwnValues, is_own
from dcl_processor.values import Values

# Equal if they call the same function; other callables may define any comparison, or none.
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)

Group = tuple[Values, list[Any]]

#: Characters of the values of a statement: a server may limit the whole to 1 MB.
MOST_CHARACTERS = 200_000

#: Parameters of a statement that are not those of its rows: an allowance where there is a limit.
_OTHER_PARAMETERS = 100

#: In the place of a value that may be a row's own.
_OWN = "own"


def group(flips: Mapping[Any, Values]) -> list[tuple[Values, list[Any]]]:
    """Group rows by the values of their flips, whose callables are called.

    A callable is called for each row, as it would be without a batch, because it may return a
    token, which two rows must not share. The exception is a clock: it returns the time of the
    statement, and a call for each row would make a statement for each row.
    """
    moments: dict[Any, date] = {}
    groups: dict[Hashable, tuple[Values, list[Any]]] = {}
    for pk, values in flips.items():
        resolved = {name: _call(value, moments) for name, value in values.items()}
        # With the user's values, == and hash() may fail, or have another meaning.
        alike = tuple((name, key_of_value(value)) for name, value in resolved.items())
        _, pks = groups.setdefault(alike, (resolved, []))
        pks.append(pk)
    return list(groups.values())


def merge(
    groups: Sequence[Group], question: Question[Any], compared: Iterable[str] = ()
) -> list[Group]:
    """Merge groups that write the same columns, so that one statement writes them.

    ``compared``: columns that the statement compares with a value besides.

    A column whose values differ gets ``OwnValues``. It cannot if its field, or a value in it,
    needs SQL of its own; rows with the same values of such columns are still merged. A value that
    its field refuses stays in a group of its own, so that writing it fails that row alone.
    """
    model, using = question.model, question.using
    if len(groups) < 2 or not all(is_own(model, name) for name in compared):
        return [*groups]
    columns: dict[str, OwnColumn] = {}
    alike: dict[Hashable, list[tuple[Group, dict[str, Any]]]] = {}
    for values, pks in groups:
        prepared: dict[str, Any] = {}
        places = []
        for name in sorted(values):
            if name not in columns:
                columns[name] = OwnColumn(model, using, name)
            # A statement for several tables joins nothing.
            here = columns[name].is_own
            place = _place(columns[name], name, values[name], prepared) if here else id(values)
            places.append((name, place))
        alike.setdefault(tuple(places), []).append(((values, pks), prepared))
    most = connections[using].features.max_query_params
    types = partial(question.writes.get, ("types",), partial(own_values.types, model, using))
    return [each for some in alike.values() for each in _merged(some, columns, most, types)]


def _place(column: OwnColumn, name: str, value: Any, prepared: dict[str, Any]) -> Hashable:
    """Return what rows that one statement writes have in common in a column.

    ``prepared``: gets the value in the database's form if it may be a row's own.
    """
    if (
        not column.fits
        or hasattr(value, "resolve_expression")
        or hasattr(value, "prepare_database_save")
    ):
        return key_of_value(value)
    try:
        saved = column.prepared(value)
    except Exception:  # noqa: BLE001  # writing this row alone raises it again, and explains it
        return (id(value),)
    if hasattr(saved, "as_sql"):
        return key_of_value(value)
    prepared[name] = saved
    return _OWN


def _merged(
    some: Sequence[tuple[Group, dict[str, Any]]],
    columns: Mapping[str, OwnColumn],
    most: int | None,
    types: Callable[[], Mapping[str, str] | None],
) -> Iterator[Group]:
    """Yield the groups that one statement each can write.

    ``most``: parameters of a statement; ``types``: returns those of the table's columns.
    """
    if len(some) < 2:
        yield from (group for group, _ in some)
        return
    like = key_of_value
    own = [name for name in some[0][1] if len({like(each[0][name]) for each, _ in some}) > 1]
    rows = [(pk, prepared) for (_, pks), prepared in some for pk in pks]
    size = len(rows)
    if most is not None:
        size = max(1, (most - _OTHER_PARAMETERS) // (1 + 2 * len(own)))
    for part in _parts(rows, own, size):
        values = dict(some[0][0][0])
        for number, name in enumerate(own):
            theirs = {pk: prepared[name] for pk, prepared in part}
            values[name] = OwnValues(columns[name].field, theirs, number, types() or {})
        yield values, [pk for pk, _ in part]


def _parts(
    rows: Sequence[tuple[Any, dict[str, Any]]], own: Sequence[str], most: int
) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Divide rows, so that a statement has no more rows and characters than a server accepts."""
    part: list[tuple[Any, dict[str, Any]]] = []
    size = 0
    for row in rows:
        values = [row[1][name] for name in own]
        more = sum(len(each) for each in values if isinstance(each, str | bytes))
        if part and (len(part) == most or size + more > MOST_CHARACTERS):
            yield part
            part, size = [], 0
        part.append(row)
        size += more
    if part:
        yield part


def _call(value: Any, moments: dict[Any, date]) -> Any:
    if not callable(value):
        return value
    called = value if type(value) in _FUNCTIONS else id(value)
    if called in moments:
        return moments[called]
    given = value()
    if isinstance(given, date):
        moments[called] = given
    return given
