"""The check of the options that only the ledger can keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.checks import CheckMessage

from dcl_processor import oversight
from dcl_processor.processor import BatchProcessor

LEDGER = "dcl_processor.ledger"


def check(processor: BatchProcessor[Any]) -> Iterator[CheckMessage]:
    """Yield an error for each option that needs the ledger, if there is none, or it is off."""
    if not apps.is_installed(LEDGER):
        got, hint = "none", "Add the app, and run manage.py migrate"
    elif oversight.installed() is None:
        got, hint = "DCL_PROCESSOR_LEDGER = False", "Remove this setting"
    else:
        return
    for option in ("rate", "breaker"):
        if getattr(processor, option) is not None:
            yield checks.Error(
                f"expected {LEDGER!r} in INSTALLED_APPS, and on, for {option}, which all machines "
                f"keep together, got {got}; every run is refused.",
                hint=f"{hint}; or leave {option} out.",
                obj=processor.name,
                id="dcl_processor.E018",
            )
