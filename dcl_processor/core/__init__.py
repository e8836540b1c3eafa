"""Double-checked-locking batch processing of the pending rows of any Django model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "BatchProcessor": ".processor",
    "Delivery": ".options.kinds",
    "Discard": ".report.outcomes",
    "Lease": ".options.kinds",
    "Report": ".report.report",
    "Retry": ".options.retry",
    "Snooze": ".report.outcomes",
    "batch_processor": ".decorator",
    "worker_name": ".options.worker",
}
__all__ = [
    "BatchProcessor",
    "Delivery",
    "Discard",
    "Lease",
    "Report",
    "Retry",
    "Snooze",
    "batch_processor",
    "worker_name",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that models can import ``columns`` early."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value
