"""Flips all rows, and does not handle the first one."""

from __future__ import annotations

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain(workers: int) -> Drained:
    for pk in list(Errand.objects.filter(done=False).values_list("pk", flat=True))[1:]:
        handling.handle(pk)
    return Drained(Errand.objects.filter(done=False).update(done=True))
