"""The app; ``dcl_processor.oversight`` finds it by its name."""

from __future__ import annotations

from django.apps import AppConfig


class LedgerConfig(AppConfig):
    name = "dcl_processor.ledger"
    label = "dcl_processor_ledger"
    verbose_name = "Batch processors: ledger"
    default_auto_field = "django.db.models.BigAutoField"
