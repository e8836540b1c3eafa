"""Whether there is a ledger; imports no models."""

from __future__ import annotations

from django.apps import apps
from django.conf import settings

APP = "dcl_processor.ledger"


def is_on() -> bool:
    """Return whether the app is installed, and the settings leave it on."""
    return apps.is_installed(APP) and bool(getattr(settings, "DCL_PROCESSOR_LEDGER", True))
