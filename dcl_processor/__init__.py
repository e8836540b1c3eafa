"""Double-checked-locking batch processing of the pending rows of any Django model."""

from __future__ import annotations

from .decorator import batch_processor
from .definition.kinds import Delivery
from .definition.lease import Lease
from .definition.retry import Retry
from .outcomes import Discard, Snooze
from .processor import BatchProcessor
from .report import Report
from .reservation import Reservation
from .worker import worker_name

__all__ = [
    "BatchProcessor",
    "Delivery",
    "Discard",
    "Lease",
    "Report",
    "Reservation",
    "Retry",
    "Snooze",
    "batch_processor",
    "worker_name",
]
__version__ = "0.1.0"
