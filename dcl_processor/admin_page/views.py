"""The views: they ask, and show; ``admin`` has checked that the user may see, or operate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse

from dcl_processor.admin_page import acting
from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights.answer import Answer
from dcl_processor.insights.rows import Listed, kind_of, listed
from dcl_processor.insights.status import Status, status, troubles_first
from dcl_processor.management import printing
from dcl_processor.operator import registry
from dcl_processor.operator.times import span, utc
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

#: Seconds that a question, and that all questions of one page, may take.
QUESTION, PAGE = 0.9, 6.0

#: Rows of one error that a page shows; characters of an error.
SHOWN, LONGEST = 20, 300

#: The columns of the table: the names of answers, and their heads.
COLUMNS = {**printing.OF_STATUS, "time_left": "time left", "last_run": "last run"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown of an answer; ``note``: the number of its footnote, ``None``: it has none."""

    name: str
    text: str
    note: int | None = None
    is_alarm: bool = False


class Notes(list[str]):
    """The footnotes of a page, each once: why a cell is empty."""

    def cell(self, name: str, answer: Answer[Any] | None) -> Cell:
        """Return an answer as a cell."""
        why = "not asked, because the time of the page was used up"
        if answer is None or answer.missing:
            why = shown(why if answer is None else answer.missing, LONGEST)
            if why not in self:
                self.append(why)
            return Cell(name, "", self.index(why) + 1)
        is_alarm = name in ("in_doubt", "given_up") and bool(answer.value)
        return Cell(name, _text(name, answer), None, is_alarm)


def _text(name: str, answer: Answer[Any]) -> str:
    if answer.value is None:
        return "–"
    if name == "last_run":
        return f"{utc(answer.value):%Y-%m-%d %H:%M:%S}"
    if name == "oldest":
        return f"{span(answer.value.seconds)}{'+' if answer.how == 'more than' else ''}"
    return printing.answer(answer, name)


def index(admin: Any, request: HttpRequest) -> HttpResponse:
    """Show one line for each processor, those that need a person first."""
    known, trouble = _processors()
    end, down, notes = time.monotonic() + PAGE, dict[str, str](), Notes()
    found = []
    for each in known.values():
        only = [*COLUMNS, "paused"] if time.monotonic() < end else []
        found.append(status(each, seconds=QUESTION, only=only, down=down))
    lines = [
        {
            "name": each.name,
            "state": each.state if each.answers else "?",
            "url": _address(admin, "change", each.name),
            "cells": [notes.cell(name, each.answers.get(name)) for name in COLUMNS],
        }
        for each in troubles_first(found)
    ]
    context = {
        "title": "Processors",
        "heads": COLUMNS.values(),
        "lines": lines,
        "notes": notes,
        "trouble": trouble,
        "summary": _summary(found),
    }
    return _page(admin, request, "index", context)


def detail(admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """Show one processor with its rows that need a person."""
    processor, down, notes = _processor(object_id), dict[str, str](), Notes()
    found = status(processor, seconds=QUESTION, down=down)
    labels = {**printing.LABELS, "last_run": "last run"}
    context = {
        "title": processor.name,
        "about": f"{found.delivery}, database {found.using}",
        "state": found.state,
        "cells": [(label, notes.cell(n, found.answers[n])) for n, label in labels.items()],
        "notes": notes,
        "summary": _summary([found]),
        "stuck": [_stuck(processor, each) for each in ("in_doubt", "given_up")],
        **_actions(admin, request, processor),
    }
    return _page(admin, request, "detail", context)


def _stuck(processor: BatchProcessor[Any], state: str) -> dict[str, Any]:
    """Return the rows in a state by their errors; each with the first rows that have it."""
    found = listed(processor, state, seconds=QUESTION, size=acting.MOST)
    groups: dict[str, list[Listed]] = {}
    for each in found.value.rows if found.value is not None else ():
        groups.setdefault(kind_of(each.error), []).append(each)
    has_errors = processor.retry is not None and processor.retry.last_error is not None
    return {
        "state": state,
        "heading": acting.STATES[state].capitalize(),
        "missing": shown(found.missing, LONGEST),
        "has_more": found.value is not None and found.value.after is not None,
        "groups": [
            {"kind": kind, "number": len(some), "rows": some[:SHOWN], "by_kind": has_errors}
            for kind, some in sorted(groups.items(), key=lambda each: -len(each[1]))
        ],
    }


def act(admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """Show what an action would do, or do what was confirmed."""
    processor = _processor(object_id)
    acting.require(acting.may_act(request, processor))
    try:
        wanted = acting.wanted_of(request, processor)
        if "confirmed" not in request.POST:
            return confirmation(admin, request, processor, wanted)
        context = acting.confirmed(request, processor, wanted)
    except acting.RefusedError as refused:
        messages.error(request, str(refused))
        context = None
    if context is None:
        return redirect(_address(admin, "change", processor.name))
    return _page(admin, request, "confirm", {**context, **_actions(admin, request, processor)})


def confirmation(
    admin: Any, request: HttpRequest, processor: BatchProcessor[Any], wanted: acting.Wanted
) -> HttpResponse:
    """Show the form that asks whether to go on; raises ``RefusedError``."""
    context = acting.to_confirm(request, processor, wanted)
    return _page(admin, request, "confirm", {**context, **_actions(admin, request, processor)})


# --- what the views share


def _processors() -> tuple[dict[str, BatchProcessor[Any]], list[str]]:
    try:
        found = registry.processors()
    except ProcessorError as error:
        return {}, [str(error)]
    return found, [shown(str(each), LONGEST) for each in registry.broken()]


def _processor(object_id: str) -> BatchProcessor[Any]:
    found = _processors()[0].get(unquote(object_id))
    if found is None:
        raise Http404("expected the name of a processor")
    return found


def _actions(admin: Any, request: HttpRequest, processor: BatchProcessor[Any]) -> dict[str, Any]:
    """Return what the templates need to show the actions that this user has."""
    may_act = acting.may_act(request, processor)
    offered = acting.offered(processor) if may_act else {}
    return {
        # Not the processor: a template calls what can be called, which would be a run.
        "name": processor.name,
        "offered": [(each, acting.LABELS[each]) for each in offered],
        "act_url": _address(admin, "act", processor.name),
        "detail_url": _address(admin, "change", processor.name),
    }


def _summary(found: list[Status]) -> str:
    """Return what a screen reader reads out when it changes: not the numbers of each second."""
    return "; ".join(_alarms(found)) or "No rows are in doubt, and none was given up."


def _alarms(found: list[Status]) -> Iterator[str]:
    for each in found:
        if each.kept_back:
            yield f"{each.name}: {shown(each.kept_back, LONGEST)}"
        for name in ("in_doubt", "given_up"):
            answer = each.answers.get(name)
            if answer is not None and answer.value:
                yield f"{each.name}: {acting.STATES[name]} {printing.answer(answer)}"
        if "?" in each.states:
            yield f"{each.name}: not known"


def _address(admin: Any, view: str, *arguments: str) -> str:
    return reverse(
        f"admin:dcl_admin_processor_{view}",
        args=[quote(each) for each in arguments],
        current_app=admin.admin_site.name,
    )


def _page(admin: Any, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    request.current_app = admin.admin_site.name  # as the admin does
    known = {
        **admin.admin_site.each_context(request),
        "opts": admin.opts,
        "asked": datetime.fromtimestamp(time.time(), UTC),
        "index_url": _address(admin, "changelist"),
        **context,
    }
    return TemplateResponse(request, f"dcl_admin/{template}.html", known)
