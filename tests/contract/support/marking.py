"""A processor of errands whose leases have a mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Q

from dcl_processor import BatchProcessor
from tests.models import Errand

from . import errands as the

#: A marked row is one that a worker has leased; rows that other code marks have no lease.
PENDING = Errand.objects.filter(
    Q(claimed=False) | Q(claimed=True, leased_until__isnull=False), done=False, dead=False
)
MARK = {"claimed": True, "result": lambda: "me"}
RESET = {"claimed": False, "result": ""}


def marking(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    mark = {"pending": PENDING, "claim": MARK, "claimed_at": "claimed_at", "reset": RESET}
    done = {"done": {"done": True, "claimed": False}}
    return the.at_least_once(handler, **{**mark, **done, "retry": the.retry(), **options})
