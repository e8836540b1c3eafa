"""For the tests of projects that write processors: the outcome of a row, and a race.

These are plain functions, for any test runner; with pytest they are fixtures, which need no import.
"""

from __future__ import annotations

from dcl_processor.testing.racing import race
from dcl_processor.testing.settling import assert_settles, make_due

__all__ = ["assert_settles", "make_due", "race"]
