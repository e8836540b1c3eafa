"""A processor of errands whose leases have a mark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from dcl_processor import BatchProcessor
from tests.models import Errand

from . import errands as the

#: A marked row is one that a worker has leased; rows that other code marks have no lease.
PENDING = Errand.objects.filter(
    Q(claimed=False) | Q(claimed=True, leased_until__isnull=False), done=False, dead=False
)
MARK = {"claimed": True, "result": lambda: "me"}
RESET = {"claimed": False, "result": ""}


def left_by_a_dead_worker(**values: Any) -> Errand:
    """Make a row as a killed worker leaves it, after its lease has lapsed."""
    ago = timezone.now() - timedelta(days=1)
    mark = {"claimed": True, "result": "dead", "claimed_at": ago, "leased_until": ago}
    return Errand.objects.create(**{**mark, "attempts": 1, **values})


def marking(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    mark = {"pending": PENDING, "claim": MARK, "claimed_at": "claimed_at", "reset": RESET}
    done = {"done": {"done": True, "claimed": False}}
    return the.at_least_once(handler, **{**mark, **done, "retry": the.retry(), **options})
