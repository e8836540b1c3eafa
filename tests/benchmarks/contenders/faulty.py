"""Two that flip all rows, and handle one of them twice or not at all."""

from __future__ import annotations

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain(copies: int, *, fault: str) -> Drained:
    pks = list(Errand.objects.filter(done=False).values_list("pk", flat=True))
    calls = pks[1:] if fault == "loses" else [*pks, pks[0]]
    for pk in calls:
        handling.handle(pk)
    return Drained(Errand.objects.filter(done=False).update(done=True))
