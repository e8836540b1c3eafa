"""Texts of errors, as they are kept: in one line, short, and without passwords."""

from __future__ import annotations

from dcl_processor.diagnosis import describe
from dcl_processor.masking import shown

from .models import TEXT


def kept(error: BaseException | None) -> str:
    """Return the text of an error that the ledger keeps."""
    return "" if error is None else kept_text(describe(error))


def kept_text(text: str) -> str:
    """Return a text as the ledger keeps it."""
    return shown(text, TEXT)
