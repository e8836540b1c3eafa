"""Who may act on rows, and an action in two steps: what it would do, and what was confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.core.management.base import CommandError
from django.http import HttpRequest

from dcl_processor import ledger
from dcl_processor.insights import rows
from dcl_processor.insights.rows import key_text
from dcl_processor.management.command_line import keys as parsed
from dcl_processor.management.command_line import typed_values
from dcl_processor.management.printing import first_keys, named
from dcl_processor.management.printing import rows as counted
from dcl_processor.operator import actions
from dcl_processor.operator.actions import CHANGED, DID, Choice, Write, Written
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.states import default_age, is_timeless
from dcl_processor.operator.times import reading
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

VIEW = "dcl_admin.view_processors"
OPERATE = "dcl_admin.operate_processors"

#: What the actions on rows are called on buttons.
LABELS = {"requeue": "Put back", "mark_done": "Mark as done", "discard": "Discard"}

#: Whose rows are acted on: a state's, or those whose keys are given.
STATES = {"given_up": "given up", "in_doubt": "in doubt", "rows": "selected"}

#: Rows of one confirmation: its form has a field for each, and Django takes a thousand fields.
MOST = 500

#: Seconds that a request waits for an answer about rows, and for a lock of the table.
BUDGET, PATIENCE = 5.0, 1.0

#: Characters that a person may type, and those of a message.
LONGEST_REASON, LONGEST_VALUES, LONGEST = 200, 10_000, 500


def may_view(request: HttpRequest) -> bool:
    """Return whether the user may see the processors, and the keys and errors of their rows."""
    user: Any = request.user
    return bool(user.has_perm(VIEW))


def may_operate(request: HttpRequest) -> bool:
    """Return whether the user may operate processors; who may not see them may not."""
    user: Any = request.user
    return may_view(request) and bool(user.has_perm(OPERATE))


def may_act(request: HttpRequest, processor: BatchProcessor[Any]) -> bool:
    """Return whether the user may operate processors, and change the rows of this one's model."""
    if not may_operate(request):
        return False
    try:
        options = rows.question_of(processor, None).model._meta
    except Exception:  # noqa: BLE001  # no row of it can be chosen; the panel has the reason
        return False
    user: Any = request.user
    return bool(user.has_perm(f"{options.app_label}.{get_permission_codename('change', options)}"))


def require(may: bool) -> None:
    """Raise ``PermissionDenied`` unless the user may."""
    if not may:
        raise PermissionDenied


class RefusedError(Exception):
    """An action that is not done; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows an operator wants: those of a state, perhaps of one class of error, or of keys."""

    action: str
    state: str
    kind: str | None = None
    keys: Sequence[str] | None = None

    @property
    def words(self) -> str:
        kind = "" if self.kind is None else f", {shown(self.kind, 100) or 'without an error'}"
        return STATES[self.state] + kind


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows that an action would be applied to; ``has_more``: than one confirmation takes."""

    wanted: Wanted
    write: Write
    choice: Choice = field(default_factory=Choice)
    has_more: bool = False


def offered(processor: BatchProcessor[Any]) -> dict[str, bool]:
    """Return the actions that the processor has, and whether they need values."""
    found = {} if actions.values_to_put_back(processor) is None else {"requeue": False}
    if processor.claim is None or not is_timeless(processor):
        found |= {"mark_done": processor.done is None, "discard": processor.failed is None}
    return found


def wanted_of(request: HttpRequest, processor: BatchProcessor[Any]) -> Wanted:
    """Return what a form asks for; raises ``RefusedError``."""
    sent = request.POST
    action, state = sent.get("action", ""), sent.get("state", "")
    if action not in offered(processor) or state not in STATES:
        raise RefusedError(f"expected an action that {processor.name} has, on rows in a state")
    # Escaped as in an address, because a browser changes line breaks in a form's values.
    keys = [unquote(each) for each in sent.getlist("pk")]
    return Wanted(action, state, sent.get("kind"), keys or ([] if state == "rows" else None))


def plan(
    processor: BatchProcessor[Any], wanted: Wanted, values: Any = None, reason: str = ""
) -> Plan:
    """Return what an action would do; writes and locks nothing; raises ``RefusedError``."""
    try:
        question = rows.question_of(processor, None)
        pks = None if wanted.keys is None else [*dict.fromkeys(parsed(processor, wanted.keys))]
        with reading(question.using, BUDGET):
            found = rows.chosen(
                processor,
                question,
                keys=pks if wanted.state == "rows" else None,
                in_doubt=default_age(processor) if wanted.state == "in_doubt" else None,
                kind=wanted.kind,
            )
            found = found if pks is None else found.filter(pk__in=pks)
            read = found.order_by("pk").values_list("pk", flat=True)[: MOST + 1]
            first = [*dict.fromkeys(read)]
            some = found.filter(pk__in=first[:MOST])
            write = actions.to_act(wanted.action, processor, some, values=values, reason=reason)
            choice = write.choose()
    except CommandError as error:
        raise RefusedError(shown(str(error), 300)) from error
    except Exception as error:
        raise RefusedError(f"{processor.name}: {explain(error, processor)}") from error
    if gone := [pk for pk in pks or () if pk not in first]:
        choice.left = {CHANGED: gone, **choice.left}
    return Plan(wanted, write, choice, len(first) > MOST)


def to_confirm(
    request: HttpRequest, processor: BatchProcessor[Any], wanted: Wanted, trouble: str = ""
) -> dict[str, Any]:
    """Return the context of the form that asks whether to go on."""
    needs_values = offered(processor).get(wanted.action, False)
    model = rows.question_of(processor, None).model
    stand_in = next(f.name for f in model._meta.fields if not (f.primary_key or f.generated))
    stand_ins = dict.fromkeys([stand_in, *(processor.claim or ())])
    found = plan(processor, wanted, stand_ins if needs_values else None)
    label, chosen = LABELS[wanted.action], [*found.choice.rows]
    return {
        "title": f"{label}: {processor.name}",
        "wanted": wanted,
        "keys": [key_text(pk) for pk in chosen],
        "button": f"{label} {counted(len(chosen))}",
        "some": named(chosen),
        "did": DID[wanted.action],
        "has_more": found.has_more,
        "left": [(counted(len(pks)), why) for why, pks in found.choice.left.items()],
        "needs_values": needs_values,
        "values": request.POST.get("values", "")[:LONGEST_VALUES],
        "reason": request.POST.get("reason", "")[:LONGEST_REASON],
        "trouble": trouble,
    }


def confirmed(
    request: HttpRequest, processor: BatchProcessor[Any], wanted: Wanted
) -> dict[str, Any] | None:
    """Write to those of the rows that are still as wanted; ask again if something is in the way.

    ``None``: all is done, and the messages say what.
    """
    reason = request.POST.get("reason", "").strip()[:LONGEST_REASON]
    typed = request.POST.get("values", "")[:LONGEST_VALUES].splitlines()
    pairs = [(name, value) for name, _, value in (each.partition("=") for each in typed if each)]
    if offered(processor)[wanted.action] and not pairs:
        return to_confirm(request, processor, wanted, "expected values, one COLUMN=VALUE a line.")
    try:
        model = rows.question_of(processor, None).model
        values = typed_values(model, pairs, "COLUMN=VALUE")
    except CommandError as error:
        return to_confirm(request, processor, wanted, shown(str(error), 300))
    found, done, trouble = plan(processor, wanted, values or None, reason), Written(), ""
    try:
        found.write.to_free(found.choice.rows, done, seconds=PATIENCE)
    except Exception as error:  # noqa: BLE001  # a sentence, and what was done before
        trouble = explain(error, processor)
    _record(request, processor, found, done, {"Values": str(values or ""), "Reason": reason})
    if not trouble:
        return None
    written = {key_text(pk) for pk in done.written}
    rest = [key for key in wanted.keys or () if key not in written]
    return to_confirm(request, processor, Wanted(wanted.action, "rows", None, rest), trouble)


def _record(
    request: HttpRequest,
    processor: BatchProcessor[Any],
    found: Plan,
    done: Written,
    typed: dict[str, str],
) -> None:
    """Tell the person, the admin's log and the ledger what was done."""
    action, name = found.wanted.action, processor.name
    messages.success(request, f"{name}: {counted(len(done.written))} {DID[action]}.")
    for why, pks in {**found.choice.left, **done.left()}.items():
        messages.warning(request, f"{name}: {counted(len(pks))} left: {why}.")
    if not done.written:
        return
    said = "".join(f" {label}: {shown(text, 300)}" for label, text in typed.items() if text)
    message = f"{LABELS[action]} ({found.wanted.words}).{said}"
    table = rows.question_of(processor, None).table
    user: Any = request.user
    text: Any = shown(message, LONGEST)
    found_again = table.filter(pk__in=done.written)
    LogEntry.objects.log_actions(user.pk, found_again, CHANGE, text)
    ledger.record(
        processor,
        action.replace("_", "-"),
        by=f"{request.user} in the admin",
        rows=len(done.written),
        keys=first_keys(done.written),
        values=shown(typed["Values"], 300),
        reason=typed["Reason"],
    )
