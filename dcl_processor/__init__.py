"""Double-checked-locking batch processing of the pending rows of any Django model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcl_processor.processor import BatchProcessor

    from .decorator import batch_processor
    from .options.kinds import Delivery, Lease
    from .options.retry import Retry
    from .options.worker import worker_name
    from .report.outcomes import Discard, Snooze
    from .report.report import Report

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


# Not for type checkers, which would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        ``python -m dcl_processor.alive`` imports this module, too, and must not wait for Django.
        """
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
