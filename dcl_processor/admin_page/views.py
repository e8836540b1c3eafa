"""The views: they ask, and show; ``admin`` has checked that the user may see, or operate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse

from dcl_processor.exceptions import ProcessorError
from dcl_processor.insights.row import show
from dcl_processor.insights.rows import key_of, question_of
from dcl_processor.management.wording import PARTS, holder
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.times import utc_text
from dcl_processor.oversight import has_ledger
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable, shown

from . import audit, confirming, ledger, panels, permissions
from .choosing import RefusedError, offered
from .permissions import LABELS

if TYPE_CHECKING:
    from .admin import ProcessorAdmin

#: Entries of the admin's log that a page shows.
RECENT = 10

#: Processors of one page that are asked about.
MOST = 100


def index(admin: ProcessorAdmin, request: HttpRequest) -> HttpResponse:
    """Show all processors."""
    found, trouble = _processors()
    names = [*found][:MOST]
    before = panels.parse(request.GET.get("seen", ""), names)
    end, down, now = time.monotonic() + panels.PAGE, dict[str, str](), time.time()
    shown_ = [
        panels.panel(f"p{at}", each, before.get(names[at], ()), now=now, end=end, down=down)
        for at, each in enumerate(map(found.__getitem__, names))
    ]
    if len(found) > MOST:
        trouble.append(f"Only the first {MOST} of {len(found)} processors are on this page.")
    controls = ledger.controls([each.processor for each in shown_])
    context = {
        "title": "Processors",
        "panels": [
            {
                "panel": each,
                "url": _address(admin, "change", each.name),
                "control": controls.get(each.name),
            }
            for each in shown_
        ],
        "control": controls.get(ledger.ALL),
        "control_url": _address(admin, "control_all"),
        "controls": ledger.CONTROLS,
        "may_operate": permissions.may_operate(request),
        "trouble": trouble,
        "refresh": _refresh(shown_, panels.FEW),
        "summary": _summary(shown_, controls),
    }
    return _page(admin, request, "index", context)


def detail(admin: ProcessorAdmin, request: HttpRequest, object_id: str) -> HttpResponse:
    """Show one processor with its rows that need a person."""
    processor = _processor(object_id)
    name = processor.name
    before = panels.parse(request.GET.get("seen", ""), [name]).get(name, ())
    end, down = time.monotonic() + panels.PAGE, dict[str, str]()
    panel = panels.panel("p0", processor, before, now=time.time(), end=end, down=down)
    controls = ledger.controls([processor])
    context = {
        "title": name,
        "each": {"panel": panel, "control": controls.get(name)},
        "details": panels.details(processor, end, down),
        "chart": chart(panel.pace.points),
        "recent": audit.recent(name, RECENT),
        "refresh": _refresh([panel], panels.MANY),
        "summary": _summary([panel], controls),
        **_actions(admin, request, processor),
    }
    return _page(admin, request, "detail", context)


def row(admin: ProcessorAdmin, request: HttpRequest, object_id: str, key: str) -> HttpResponse:
    """Show why one row is handled, or not, and who holds it."""
    processor = _processor(object_id)
    text = unquote(key)
    try:
        pk = key_of(question_of(processor, None).model, text)
        found = show(processor, pk, seconds=panels.PANEL)
    except Exception as error:
        raise Http404(explain(error, processor)) from error
    locked = found.locked
    context = {
        "title": f"Row {text} of {processor.name}",
        "row": found,
        "key": text,
        "reason": shown(found.reason, panels.LONGEST),
        "parts": [(PARTS[name], part) for name, part in found.parts.items() if name in PARTS],
        "columns": [
            (name, shown(str(value), panels.LONGEST) if value is not None else "")
            for name, value in found.columns.items()
        ],
        "holders": [shown(holder(each), panels.LONGEST) for each in locked.value.holders]
        if locked is not None and locked.value is not None
        else [],
        **_actions(admin, request, processor),
    }
    return _page(admin, request, "row", context)


def act(admin: ProcessorAdmin, request: HttpRequest, object_id: str) -> HttpResponse:
    """Show what an action would do, or do what was confirmed."""
    processor = _processor(object_id)
    permissions.require(permissions.may_act(request, processor))
    try:
        context = confirming.answer(request, processor)
    except RefusedError as refused:
        messages.error(request, str(refused))
        context = None
    if context is None:
        return redirect(_address(admin, "change", processor.name))
    return confirmation(admin, request, processor, context)


def confirmation(
    admin: ProcessorAdmin,
    request: HttpRequest,
    processor: BatchProcessor[Any],
    context: dict[str, Any],
) -> HttpResponse:
    """Show the form that asks whether to go on."""
    return _page(admin, request, "confirm", {**context, **_actions(admin, request, processor)})


def control(admin: ProcessorAdmin, request: HttpRequest, object_id: str = "") -> HttpResponse:
    """Do one of the ledger's controls with a processor, or with all of them."""
    processor = _processor(object_id)
    wanted = request.POST.get("control", "")
    if not has_ledger() or wanted not in ledger.CONTROLS:
        raise Http404("expected a control of an installed ledger")
    name = processor.name if object_id else ledger.ALL
    who = name or "all processors"
    said = {"until": "", "reason": ""}
    if wanted == "pause":
        said = {each: printable(request.POST.get(each, "").strip())[:200] for each in said}
    by = f"{request.user} in the admin"
    try:
        has_changed = ledger.act(processor if object_id else name, wanted, by=by, **said)
    except Exception as error:  # noqa: BLE001  # a sentence for the person who asked
        messages.error(request, shown(f"{who}: {explain(error, processor)}", 500))
    else:
        found = ledger.controls([processor])[name].state
        if has_changed:
            words = [f"{each.capitalize()}: {said[each]}" for each in said if said[each]]
            audit.record(request.user, name, " ".join([f"{ledger.CONTROLS[wanted]}.", *words]))
            messages.success(request, f"{who}: {found}")
        else:
            messages.warning(request, f"{who}: nothing to change. {found}")
    return redirect(_address(admin, "change", name) if name else _address(admin, "changelist"))


def _processors() -> tuple[dict[str, BatchProcessor[Any]], list[str]]:
    try:
        found = registry.processors()
    except ProcessorError as error:
        return {}, [str(error)]
    return found, [shown(str(each), panels.LONGEST) for each in registry.broken()]


def _processor(object_id: str) -> BatchProcessor[Any]:
    """Return the processor; for no name, one of all: where an order for all is kept."""
    named = _processors()[0]
    found = named.get(unquote(object_id)) if object_id else next(iter(named.values()), None)
    if found is None:
        raise Http404("expected the name of a processor")
    return found


def _actions(
    admin: ProcessorAdmin, request: HttpRequest, processor: BatchProcessor[Any]
) -> dict[str, Any]:
    """Return what the templates need to show the actions that this user has."""
    may_act = permissions.may_act(request, processor)
    return {
        # Not the processor: a template calls what can be called, which would be a run.
        "name": processor.name,
        "may_operate": permissions.may_operate(request),
        "offered": [(name, LABELS[name]) for name in offered(processor)] if may_act else [],
        "act_url": _address(admin, "act", processor.name),
        "control_url": _address(admin, "control", processor.name),
        "detail_url": _address(admin, "change", processor.name),
        "controls": ledger.CONTROLS,
    }


def _refresh(shown_: Sequence[panels.Panel], most: int) -> str:
    """Return the query of the link that shows the page again, with the counts so far."""
    return f"?seen={panels.text_of({each.name: each.pace.points for each in shown_}, most)}"


def _summary(shown_: Sequence[panels.Panel], controls: Mapping[str, ledger.Control]) -> str:
    """Return what a screen reader reads out when it changes: not the numbers of each second."""
    paused = [name for name, each in controls.items() if each.is_paused]
    # A pause of all is first, and is that of each.
    paused = ["all processors"] if ledger.ALL in paused else paused
    alarms = [f"{name}: paused" for name in paused]
    alarms += [
        f"{panel.name}: {each.label.lower()} {each.text}"
        for panel in shown_
        for each in panel.alarms
    ]
    if unknown := [panel.name for panel in shown_ if any(n.is_unknown for n in panel.numbers)]:
        alarms.append(f"not known of {', '.join(unknown)}")
    return "; ".join(alarms) or "No rows are in doubt, and none was given up."


def _address(admin: ProcessorAdmin, view: str, *arguments: str) -> str:
    return reverse(
        f"admin:dcl_admin_processor_{view}",
        args=[quote(each) for each in arguments],
        current_app=admin.admin_site.name,
    )


def _page(
    admin: ProcessorAdmin, request: HttpRequest, template: str, context: dict[str, Any]
) -> HttpResponse:
    request.current_app = admin.admin_site.name  # as the admin does
    asked = time.time()
    known = {
        **admin.admin_site.each_context(request),
        "opts": admin.opts,
        "asked_at": asked,
        "asked": datetime.fromtimestamp(asked, UTC),
        "index_url": _address(admin, "changelist"),
        **context,
    }
    return TemplateResponse(request, f"dcl_admin/{template}.html", known)


# --- a chart as SVG, drawn on the server: attributes alone, which a strict policy allows


WIDTH, HEIGHT = 600, 120

#: Room for the line's own width.
_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Chart:
    """The pending rows over time; ``points``: for ``<polyline>``; ``summary``: it in words.

    ``rows``: the same numbers, with their times.
    """

    points: str
    most: int
    rows: tuple[tuple[datetime, int], ...]
    summary: str


def chart(values: Sequence[panels.Point]) -> Chart | None:
    """Return the chart of the counts, the oldest first; ``None`` for fewer than two."""
    if len(values) < 2:
        return None
    start, end = values[0][0], values[-1][0]
    most = max(value for _, value in values)
    across = (WIDTH - 2 * _MARGIN) / ((end - start) or 1)
    up = (HEIGHT - 2 * _MARGIN) / (most or 1)
    points = " ".join(
        f"{_MARGIN + (at - start) * across:.1f},{HEIGHT - _MARGIN - value * up:.1f}"
        for at, value in values
    )
    rows = tuple((datetime.fromtimestamp(at, UTC), value) for at, value in values)
    said = [f"{value:,} at {utc_text(at)}" for at, value in (rows[0], rows[-1])]
    return Chart(points, most, rows, f"Pending rows: {', '.join(said)}, {most:,} at most.")
