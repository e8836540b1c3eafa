"""An action in two steps: what it would do, with the number of rows; then what was confirmed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from django.contrib import messages
from django.core.management.base import CommandError
from django.http import HttpRequest

from dcl_processor.insights import rows
from dcl_processor.insights.rows import LONGEST_KIND, key_text
from dcl_processor.management import wording
from dcl_processor.management.acting import named
from dcl_processor.management.command_line import typed_values
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.states import default_age
from dcl_processor.operator.writes import Written
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

from . import audit
from .choosing import ROWS, Plan, RefusedError, Wanted, anything, choose, offered
from .permissions import LABELS

#: The states whose rows are acted on, or the rows that were selected.
STATES = ("given_up", "in_doubt", ROWS)

#: Characters that a person may type for the row's last error, and for values.
LONGEST_REASON, LONGEST_VALUES = 200, 10_000


def answer(request: HttpRequest, processor: BatchProcessor[Any]) -> dict[str, Any] | None:
    """Return the context of the next form; ``None``: all is done, and the messages say what.

    Raises ``RefusedError``.
    """
    action = request.POST.get("action", "")
    if action not in offered(processor):
        raise RefusedError(f"expected an action that {processor.name} has")
    state, kind = request.POST.get("state", ""), request.POST.get("kind")
    if state not in STATES:
        raise RefusedError("expected rows that are given up, in doubt or selected")
    wanted = Wanted(state, None if kind is None else kind[:LONGEST_KIND])
    # Escaped as in an address, because a browser changes line breaks in a form's values.
    keys = [unquote(each) for each in request.POST.getlist("pk")]
    if "confirmed" in request.POST:
        return _confirmed(request, processor, action, wanted, keys)
    return to_confirm(request, processor, action, wanted, keys if state == ROWS else None)


def to_confirm(
    request: HttpRequest,
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str] | None,
    *,
    trouble: str = "",
) -> dict[str, Any]:
    """Choose the rows, and return the context of the form that asks whether to go on.

    The number on its button is that of the rows it acts on.
    """
    needs_values = offered(processor).get(action, False)
    values = anything(rows.question_of(processor, None).model) if needs_values else None
    plan = _chosen(processor, action, wanted, keys, values=values)
    label = LABELS[action]
    return {
        "title": f"{label}: {processor.name}",
        "plan": plan,
        "keys": [key_text(pk) for pk in plan.rows],
        "button": f"{label} {wording.rows(len(plan.rows))}",
        "what": _said(wanted),
        "some": named([key_text(pk) for pk in plan.rows]) if plan.rows else "",
        "left": [(wording.rows(number), why) for why, number in plan.left.items()],
        "needs_values": needs_values,
        "takes_values": plan.act.takes_values,
        "takes_reason": plan.act.takes_reason,
        "values": request.POST.get("values", "")[:LONGEST_VALUES],
        "reason": request.POST.get("reason", "")[:LONGEST_REASON],
        "trouble": trouble,
        "command": command(processor, plan, request.POST),
    }


def _chosen(
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str] | None,
    **given: Any,
) -> Plan:
    try:
        return choose(processor, action, wanted, keys, **given)
    except CommandError as error:
        raise RefusedError(shown(str(error), 300)) from error
    except Exception as error:
        raise RefusedError(explain(error, processor)) from error


def _confirmed(
    request: HttpRequest,
    processor: BatchProcessor[Any],
    action: str,
    wanted: Wanted,
    keys: Sequence[str],
) -> dict[str, Any] | None:
    """Write to those of the rows that are still as wanted; ask again if something is in the way."""
    reason, done, trouble = _reason(request.POST), Written(), ""
    try:
        values = _values(processor, action, _lines(request.POST))
    except CommandError as error:
        said = shown(str(error), 300)
        return to_confirm(request, processor, action, wanted, keys, trouble=said)
    plan = _chosen(processor, action, wanted, keys, values=values or None, reason=reason)
    try:
        plan.apply(done)
    except Exception as error:  # noqa: BLE001  # a sentence, and what was done before
        trouble = explain(error, processor)
    typed = {" Values": str(values) if values else "", " Reason": reason}
    message = f"{LABELS[action]} ({_said(wanted)})."
    message += "".join(f"{name}: {shown(text, 300)}" for name, text in typed.items() if text)
    audit.record_rows(request.user, processor, done.written, message, total=len(keys))
    _tell(request, processor, plan, done)
    if not trouble:
        return None
    written = {key_text(pk) for pk in done.written}
    rest = [key for key in keys if key not in written]
    return to_confirm(request, processor, action, wanted, rest, trouble=trouble)


def _values(processor: BatchProcessor[Any], action: str, lines: list[str]) -> dict[str, Any]:
    if offered(processor).get(action) and not lines:
        raise CommandError("expected values, one COLUMN=VALUE a line.")
    return typed_values(rows.question_of(processor, None).model, lines)


def _tell(request: HttpRequest, processor: BatchProcessor[Any], plan: Plan, done: Written) -> None:
    said = f"{wording.rows(len(done.written))} {plan.act.did}."
    messages.success(request, f"{processor.name}: {said}")
    left = {**plan.left, **{why: len(pks) for why, pks in done.left().items()}}
    for why, number in left.items():
        messages.warning(request, f"{processor.name}: {wording.rows(number)} left: {why}.")


def command(processor: BatchProcessor[Any], plan: Plan, typed: Mapping[str, str]) -> str:
    """Return the command that does the same, if there is one; ``typed``: values and a reason."""
    line = f"manage.py processors {plan.action.replace('_', '-')} {shlex.quote(processor.name)}"
    chosen = _option(processor, plan)
    if not chosen:
        return ""
    options = [f"--set {shlex.quote(each)}" for each in _lines(typed)]
    if not options and offered(processor).get(plan.action):
        options = ["--set COLUMN=VALUE"]
    if plan.act.takes_reason and (reason := _reason(typed)):
        options.append(f"--reason {shlex.quote(reason)}")
    return " ".join([line, chosen, *options])


def _option(processor: BatchProcessor[Any], plan: Plan) -> str:
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
