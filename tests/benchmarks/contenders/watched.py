"""This package, with what is noted of each run and row: the ledger, or metrics and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.test import override_settings

from tests.benchmarks.contenders import Drained, ours
from tests.benchmarks.contenders.ours import left, prepare

__all__ = ["drain", "left", "prepare"]


def drain(workers: int, *, by: str) -> Drained:
    with WATCHERS[by]():
        return ours.drain(workers, delivery="transactional", batch_size=1)


@contextmanager
def _exporting() -> Iterator[None]:
    from dcl_processor.metrics.collector import Collector
    from tests.contract.support.onlookers import exporting, looking_on

    with looking_on(Collector()), exporting():
        yield


WATCHERS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "ledger": lambda: override_settings(DCL_PROCESSOR_LEDGER=True),
    "metrics": _exporting,
}
