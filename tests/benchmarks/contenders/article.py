"""The loop by hand, as the article about the pattern has it: right, and one row at a time."""

from __future__ import annotations

from django.db import transaction

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain() -> Drained:
    handle, handled = handling.handle, 0
    for candidate in Errand.objects.filter(done=False).order_by("pk"):
        with transaction.atomic():
            locked = Errand.objects.select_for_update(skip_locked=True)
            row = locked.filter(pk=candidate.pk, done=False).first()
            if row is None:
                continue
            handle(row.pk)
            row.done = True
            row.save()
            handled += 1
    return Drained(handled)
