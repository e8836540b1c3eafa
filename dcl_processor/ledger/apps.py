"""The app, which registers the ledger with the runs of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.conf import settings

from dcl_processor import oversight

if TYPE_CHECKING:
    from .ledger import Ledger


class LedgerConfig(AppConfig):
    name = "dcl_processor.ledger"
    label = "dcl_processor_ledger"
    verbose_name = "Batch processors: ledger"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the ledger; no query is sent before a run."""
        oversight.install(find)


def find() -> Ledger | None:
    """Return the ledger of this process, or ``None`` if the settings switch it off."""
    if not getattr(settings, "DCL_PROCESSOR_LEDGER", True):
        return None
    from .ledger import ledger  # its tables are models

    return ledger()
