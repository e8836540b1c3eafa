"""The app, which looks on at runs, and lets their rows start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import AppConfig

from dcl_processor.ledger import APP, is_on
from dcl_processor.report.observer import observers_installed

if TYPE_CHECKING:
    from dcl_processor.ledger.run import LedgerOfRun


class LedgerConfig(AppConfig):
    name = APP
    label = "dcl_processor_ledger"
    verbose_name = "Batch processors: ledger"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if of_run not in observers_installed:  # a test may set INSTALLED_APPS again
            observers_installed.append(of_run)


def of_run(processor: Any) -> LedgerOfRun | None:
    """Return the observer and gate of a run that begins, if the ledger is on."""
    if not is_on():
        return None
    from dcl_processor.ledger.run import LedgerOfRun  # has models

    return LedgerOfRun(processor)
