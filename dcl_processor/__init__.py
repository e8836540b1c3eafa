"""Double-checked-locking batch processing of the pending rows of any Django model."""

from __future__ import annotations

from .definition import BatchProcessor, batch_processor
from .delivery import Delivery
from .report import Report

__all__ = ["BatchProcessor", "Delivery", "Report", "batch_processor"]
__version__ = "0.1.0"
