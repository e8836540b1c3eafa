"""Double-checked-locking batch processing of the pending rows of any Django model."""

from __future__ import annotations

from .decorator import batch_processor
from .definition.kinds import Delivery
from .exceptions import Discard, Snooze
from .lease import Lease
from .processor import BatchProcessor
from .report import Report
from .retry import Retry

__all__ = [
    "BatchProcessor",
    "Delivery",
    "Discard",
    "Lease",
    "Report",
    "Retry",
    "Snooze",
    "batch_processor",
]
__version__ = "0.1.0"
