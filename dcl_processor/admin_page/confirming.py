"""An action in two steps: what it would do, with the number of rows; then what was confirmed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from django.contrib import messages
from django.core.management.base import CommandError
from django.http import HttpRequest

from dcl_processor.diagnosis import explain
from dcl_processor.insights import rows
from dcl_processor.insights.rows import LONGEST_KIND, key_text
from dcl_processor.management import wording
from dcl_processor.management.acting import named
from dcl_processor.management.command_line import typed_values
from dcl_processor.masking import shown
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

from . import audit
from .choosing import MOST, ROWS, Plan, RefusedError, Wanted, anything, choose, offered
from .permissions import LABELS

#: The states whose rows are acted on, or the rows that were selected.
STATES = ("given_up", "in_doubt", ROWS)

#: Characters that a person may type for the row's last error, and for values.
LONGEST_REASON, LONGEST_VALUES = 200, 10_000


def answer(request: HttpRequest, processor: BatchProcessor[Any]) -> dict[str, Any] | None:
    """Return the context of the next form; ``None``: all is done, and the messages say what.

    Raises ``RefusedError``.
    """
    if sent := request.POST.get("plan"):
        return _confirmed(request, processor, Plan.from_text(sent, processor, request.user))
    action = request.POST.get("action", "")
    if action not in offered(processor):
        raise RefusedError(f"expected an action that {processor.name} has")
    state, kind = request.POST.get("state", ""), request.POST.get("kind")
    if state not in STATES:
        raise RefusedError("expected rows that are given up, in doubt or selected")
    wanted = Wanted(state, None if kind is None else kind[:LONGEST_KIND])
    # Escaped as in an address, because a browser changes line breaks in a form's values.
    keys = [unquote(each) for each in request.POST.getlist("pk")[:MOST]] if state == ROWS else []
    return to_confirm(request, processor, action, wanted, keys)


def to_confirm(
    request: HttpRequest,
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str],
) -> dict[str, Any]:
    """Choose the rows, and return the context of the form that asks whether to go on."""
    try:
        needs_values = offered(processor).get(action, False)
        values = anything(rows.question_of(processor, None).model) if needs_values else None
        plan = choose(processor, action, wanted, keys, values=values)
    except CommandError as error:
        raise RefusedError(shown(str(error), 300)) from error
    except Exception as error:
        raise RefusedError(explain(error, processor)) from error
    return _form(request, processor, plan)


def _confirmed(
    request: HttpRequest, processor: BatchProcessor[Any], plan: Plan
) -> dict[str, Any] | None:
    reason, trouble, written = _reason(request.POST), "", list[Any]()
    try:
        values = typed_values(rows.question_of(processor, None).model, _lines(request.POST))
    except CommandError as error:
        return _form(request, processor, plan, trouble=shown(str(error), 300))
    if offered(processor).get(plan.action) and not values:
        said = "expected values, one COLUMN=VALUE a line."
        return _form(request, processor, plan, trouble=said)
    try:
        plan.apply(processor, values=values or None, reason=reason, written=written)
    except Exception as error:  # noqa: BLE001  # a sentence, and what was done before
        trouble = explain(error, processor)
    message = f"{LABELS[plan.action]} ({_said(plan.wanted)})."
    if values:
        message += f" Values: {shown(str(values), 300)}"
    if reason:
        message += f" Reason: {reason}"
    audit.record_rows(request.user, processor, written, message, total=plan.total)
    if plan.rows or trouble:
        return _form(request, processor, plan, trouble=trouble)
    messages.success(request, f"{processor.name}: {wording.rows(plan.done)} {plan.act.did}.")
    for why, number in plan.left.items():
        messages.warning(request, f"{processor.name}: {wording.rows(number)} left: {why}.")
    return None


def _form(
    request: HttpRequest, processor: BatchProcessor[Any], plan: Plan, *, trouble: str = ""
) -> dict[str, Any]:
    """Return the context of the form; the number on its button is that of the rows it acts on."""
    label = LABELS[plan.action]
    return {
        "title": f"{label}: {processor.name}",
        "plan": plan,
        "signed": plan.signed(request.user),
        "button": f"{label} {wording.rows(len(plan.rows))}",
        "what": _said(plan.wanted),
        "some": named([key_text(pk) for pk in plan.rows]) if plan.rows else "",
        "left": [(wording.rows(number), why) for why, number in plan.left.items()],
        "needs_values": offered(processor).get(plan.action, False),
        "takes_values": plan.act.takes_values,
        "takes_reason": plan.act.takes_reason,
        "values": request.POST.get("values", "")[:LONGEST_VALUES],
        "reason": request.POST.get("reason", "")[:LONGEST_REASON],
        "trouble": trouble,
        "command": command(processor, plan, request.POST),
    }


def command(processor: BatchProcessor[Any], plan: Plan, typed: Mapping[str, str]) -> str:
    """Return the command that does the same, if there is one; ``typed``: values and a reason."""
    line = f"manage.py processors {plan.action.replace('_', '-')} {shlex.quote(processor.name)}"
    chosen = _chosen(processor, plan)
    if not chosen:
        return ""
    options = [f"--set {shlex.quote(each)}" for each in _lines(typed)]
    if not options and offered(processor).get(plan.action):
        options = ["--set COLUMN=VALUE"]
    if plan.act.takes_reason and (reason := _reason(typed)):
        options.append(f"--reason {shlex.quote(reason)}")
    return " ".join([line, chosen, *options])


def _chosen(processor: BatchProcessor[Any], plan: Plan) -> str:
    """Return the option that chooses the rows of the plan, if there is one."""
    match plan.wanted.state:
        case "given_up" if plan.wanted.kind is not None:
            return f"--given-up --error={shlex.quote(plan.wanted.kind)}"
        case "given_up":
            return "--given-up"
        case "in_doubt":
            return f"--in-doubt {default_age(processor):g}s"
        case _ if len(plan.rows) <= 20:
            return f"--pk {' '.join(shlex.quote(key_text(pk)) for pk in plan.rows)}"
        case _:
            return ""


def _lines(typed: Mapping[str, str]) -> list[str]:
    """Return the values that were typed, as ``COLUMN=VALUE``."""
    text = typed.get("values", "")[:LONGEST_VALUES]
    return [each for each in text.splitlines() if each.strip()]


def _reason(typed: Mapping[str, str]) -> str:
    return typed.get("reason", "").strip()[:LONGEST_REASON]


def _said(wanted: Wanted) -> str:
    state = wording.LABELS.get(wanted.state, "selected")
    if wanted.kind is None:
        return state
    return f"{state}, {shown(wanted.kind or 'without an error', LONGEST_KIND)}"
