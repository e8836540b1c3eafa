"""Rows that are handed to a caller, who handles them and settles them, perhaps elsewhere."""

from __future__ import annotations

from dcl_processor.contrib.reservations.reservation import Reservation

__all__ = ["Reservation"]
