"""Whether there is a ledger, and what is done without an answer of it; imports no models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from django.apps import apps
from django.conf import settings

from dcl_processor.pending import steady as time
from dcl_processor.report.errors import described
from dcl_processor.report.interrupts import ends_the_run

T = TypeVar("T")

logger = logging.getLogger("dcl_processor.operations")

APP = "dcl_processor.ledger"

#: Seconds without a further question in this process after an error.
SILENCE = 60.0


def is_on() -> bool:
    """Return whether the app is installed, and the settings leave it on."""
    return apps.is_installed(APP) and bool(getattr(settings, "DCL_PROCESSOR_LEDGER", True))


def record(processor: Any, action: str, *, by: str = "", rows: int = 0, **texts: str) -> None:
    """Record what an operator has done, if the ledger is on.

    ``processor``: a processor, its name, or ``ALL``. ``by``: default the user of this process and
    the host. ``texts``: ``keys``, ``values``, ``reason`` and ``error``. It is done already, so an
    error is logged, and not raised.
    """
    if not is_on():
        return
    from dcl_processor.ledger.records import add  # has models

    try:
        add(processor, action, by=by, rows=rows, **texts)
    except Exception as error:
        if ends_the_run(error):
            raise
        about = (getattr(processor, "name", processor), action, described(error))
        logger.warning("%s: the ledger has no record of this %s: %s", *about)


class _Silence:
    until = 0.0


def quietly(ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or without one something else; an error is logged, and costs no row."""
    if time.monotonic() < _Silence.until:
        return otherwise
    try:
        return ask()
    except Exception as error:
        if ends_the_run(error):
            raise
        _Silence.until = time.monotonic() + SILENCE
        about = (SILENCE, described(error))
        logger.warning("the ledger cannot be used, and is not asked for %d s: %s", *about)
        return otherwise
