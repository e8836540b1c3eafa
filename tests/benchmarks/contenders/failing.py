"""This package, where some rows fail: each costs a traceback and a line in the log."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from django.db.models import F

from tests.benchmarks.contenders import FAILING, Drained, ours
from tests.benchmarks.contenders.ours import prepare
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain(workers: int) -> Drained:
    logger = logging.getLogger("dcl_processor")
    with Path(os.devnull).open("w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        logger.addHandler(handler)
        try:
            return ours.drain(workers, delivery="transactional", batch_size=100, failing=FAILING)
        finally:
            logger.removeHandler(handler)


def left() -> int:
    """Count what is pending beyond the rows that fail."""
    rows = Errand.objects.annotate(part=F("pk") % 100)
    return ours.left() - rows.filter(part__lt=FAILING).count()
