"""Rows that are handed to a caller, who handles them and settles them, perhaps elsewhere."""

from .reservation import Reservation

__all__ = ["Reservation"]
