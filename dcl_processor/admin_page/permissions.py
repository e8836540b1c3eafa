"""Who may see processors, and who may operate them, and what those may do with rows."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from dcl_processor.processor import BatchProcessor

VIEW = "dcl_admin.view_processors"
OPERATE = "dcl_admin.operate_processors"

#: What the actions on rows are called on buttons.
LABELS = {"requeue": "Put back", "mark_done": "Mark as done", "discard": "Discard"}


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
    from dcl_processor.insights import rows  # Workers load a project's admin, and need no answers.

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
