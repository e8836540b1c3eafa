"""Which rows an action takes, and which it leaves and why: as the command chooses them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import Model, QuerySet

from dcl_processor import steady as time
from dcl_processor.candidates.question import Question
from dcl_processor.database.time_limit import reading
from dcl_processor.definition.model_columns import shares_keys
from dcl_processor.insights import rows
from dcl_processor.insights.rows import parse_pk
from dcl_processor.management.acting import (
    CHANGED,
    DISCARD,
    MARK_DONE,
    MISSING,
    REQUEUE,
    Action,
    Choice,
    Chooser,
)
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

ACTIONS = {"requeue": REQUEUE, "mark_done": MARK_DONE, "discard": DISCARD}

#: What the actions are called on buttons.
LABELS = {"requeue": "Put back", "mark_done": "Mark as done", "discard": "Discard"}

#: In the place of a state: the rows whose keys were given.
ROWS = "rows"

#: Rows of one confirmation, of one chunk, and characters of a confirmation as JSON: its signed
#: form is at most a third longer, and Django takes 2.5 MB of a form.
MOST, CHUNK, MOST_CHARACTERS = 50_000, 500, 1_500_000

#: Seconds that a request may take to choose rows, or to write to them.
BUDGET = 5.0


@dataclass(slots=True)
class Choosing:
    """The rows that an action will take, by key with the digests of their marks.

    ``left``: how many rows the action would leave as they are, by reason; ``has_more``: whether
    there are more rows.
    """

    rows: dict[Any, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows an operator wants: those of a state, perhaps of one class of error, or of keys."""

    state: str
    kind: str | None = None

    def among(
        self, processor: BatchProcessor[Any], question: Question[Any]
    ) -> QuerySet[Any, Any] | None:
        """Return the rows; ``None``: any row of the model that has one of the keys."""
        match self.state:
            case "rows":
                return None
            case "in_doubt":
                found = rows.in_doubt(processor, question, default_age(processor))
            case _:
                found = rows.given_up(processor, question)
        found = question.table.none() if found is None else found
        return found if self.kind is None else rows.of_kind(processor, found, self.kind)


@dataclass(frozen=True, slots=True)
class KeysChooser(Chooser):
    """Chooses among rows of these keys, if they still are in the state that was wanted."""

    keys: Sequence[Any] = ()
    among: QuerySet[Any, Any] | None = None

    def find(self) -> tuple[QuerySet[Any], list[Any]]:
        """Return the rows that have the keys, and the keys of which there is no such row."""
        base = self.question.table if self.among is None else self.among
        found = base.filter(pk__in=self.keys)
        there = set(found.order_by().values_list("pk", flat=True))
        return found, [pk for pk in self.keys if pk not in there]


def choose_chunk(
    processor: BatchProcessor[Any],
    action: Action,
    wanted: Wanted,
    keys: Sequence[Any],
    *,
    values: dict[str, Any] | None = None,
    reason: str = "",
) -> Choice:
    """Choose among the rows of some keys; nothing is written, and nothing is locked."""
    question = rows.question_of(processor, None)
    options = {
        # Keys that a person picked are checked more closely than a state.
        "pk": [*keys] if wanted.state == ROWS else None,
        "in_doubt": None,
        "given_up": False,
        "force": False,
        "values": values,
        "reason": reason,
        "using": None,
    }
    with reading(question.using, BUDGET):
        chooser = KeysChooser(processor, question, options, keys, wanted.among(processor, question))
        choice = chooser.choice(action)
    if wanted.state != ROWS and MISSING in choice.left:
        # There may be such a row, but it has left the state.
        choice.left[CHANGED] = choice.left.pop(MISSING)
    return choice


def choose(
    processor: BatchProcessor[Any],
    action: Action,
    wanted: Wanted,
    keys: Sequence[Any] | None = None,
    *,
    values: dict[str, Any] | None = None,
) -> Choosing:
    """Look at the rows until the time is used up, and return what an action would do with them.

    ``keys``: those that a person picked; of a state all rows are looked at, in the order of keys.
    """
    end = time.monotonic() + BUDGET
    question = rows.question_of(processor, None)
    found = Choosing()
    if keys is None:
        with reading(question.using, BUDGET):
            keys = _keys_of(processor, wanted, question)
    characters = 0
    for some in chunks(keys):
        if len(found.rows) >= MOST or found.has_more or time.monotonic() > end:
            found.has_more = True
            break
        choice = choose_chunk(processor, action, wanted, some, values=values)
        for pk, digest in choice.rows.items():
            characters += len(json.dumps([plain(pk), digest])) + 1
            if characters > MOST_CHARACTERS:
                found.has_more = True
                break
            found.rows[pk] = digest
        for why, pks in choice.left.items():
            found.left[why] = found.left.get(why, 0) + len(pks)
    if len(keys) > MOST:
        found.has_more = True
    return found


def elsewhere(processor: BatchProcessor[Any], listed: QuerySet[Any]) -> str:
    """Return why the rows of a list are not the processor's; empty: they are.

    A key names another row in another table, and in another database. A list without a database of
    its own may read from replicas, and is that of the database to which its rows are written.
    """
    question = rows.question_of(processor, None)
    if not shares_keys(listed.model, question.model):
        return (
            f"{processor.name}: expected a list of {question.model._meta.label}, whose rows the "
            f"processor handles, got one of {listed.model._meta.label}; name the processor in the "
            "list of its own model."
        )
    ours = question.using
    named: Any = listed
    chosen = named._db  # noqa: SLF001  # .db would ask the router, perhaps for a replica
    theirs = chosen or router.db_for_write(listed.model)
    if theirs == ours:
        return ""
    return (
        f"{processor.name}: expected a list of the database {ours!r}, which the processor uses, "
        f"got one of {theirs!r}; return get_queryset(…).using({ours!r}) for the list, or set the "
        f"processor's using={theirs!r}."
    )


def offered(processor: BatchProcessor[Any]) -> dict[str, bool]:
    """Return the actions that the processor has, and whether they need values."""
    try:
        question = rows.question_of(processor, None)
    except Exception:  # noqa: BLE001  # no row of it can be chosen; the panel has the reason
        return {}
    none = question.table.none()
    found = {}
    for name, action in ACTIONS.items():
        options: dict[str, Any] = {"values": None, "reason": "", "force": False}
        if _can(action, processor, none, options):
            found[name] = False
        elif action.takes_values and _can(
            action, processor, none, {**options, "values": anything(question.model)}
        ):
            found[name] = True
    return found


def anything(model: type[Model]) -> dict[str, Any]:
    """Return values that stand for those that a person is still to type."""
    fields = (each for each in model._meta.concrete_fields if not each.generated)
    return {next(each.name for each in fields if each not in model._meta.pk_fields): None}


def _can(
    action: Action, processor: BatchProcessor[Any], none: QuerySet[Any], options: dict[str, Any]
) -> bool:
    try:
        action.prepare(processor, none, options)
    except ImproperlyConfigured:
        return False
    return True


def chunks(keys: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the keys in chunks."""
    for at in range(0, len(keys), CHUNK):
        yield keys[at : at + CHUNK]


def _keys_of(processor: BatchProcessor[Any], wanted: Wanted, question: Question[Any]) -> list[Any]:
    among = wanted.among(processor, question)
    if among is None:
        return []
    keys = among.order_by("pk").values_list("pk", flat=True)[: MOST + 1]
    return list(dict.fromkeys(keys))


# --- primary keys as texts: in a form, in an address, and in a signed plan


def plain(pk: Any) -> Any:
    """Return a primary key as JSON has it."""
    if isinstance(pk, tuple):
        return [plain(each) for each in pk]
    return pk if isinstance(pk, (int, str)) else str(pk)


def of_plain(model: type[Model], value: Any) -> Any:
    """Return the primary key that JSON has so."""
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _python(fields[0], value)
    return tuple(_python(each, part) for each, part in zip(fields, value, strict=True))


def keys_of(processor: BatchProcessor[Any], texts: Sequence[str]) -> list[Any]:
    """Return the primary keys that a form names; raises the errors of ``parse_pk()``.

    ``texts``: escaped as in an address, because a browser changes line breaks in a form's values.
    """
    return list(dict.fromkeys(parse_pk(processor, unquote(text)) for text in texts))


def _python(field: Any, value: Any) -> Any:
    while field.remote_field:
        field = field.target_field
    return field.to_python(value)
