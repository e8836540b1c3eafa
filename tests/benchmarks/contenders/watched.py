"""This package, with all that can be noted of each run and row: the ledger, metrics and traces."""

from __future__ import annotations

from django.test import override_settings

from tests.benchmarks.contenders import Drained, ours
from tests.benchmarks.contenders.ours import left, prepare

__all__ = ["drain", "left", "prepare"]


def drain(workers: int) -> Drained:
    from dcl_processor.metrics import Collector
    from tests.contract.support.onlookers import exporting, looking_on

    with override_settings(DCL_PROCESSOR_LEDGER=True), looking_on(Collector()), exporting():
        return ours.drain(workers, delivery="transactional", batch_size=1)
