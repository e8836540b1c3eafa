"""For the tests of projects that write processors: the outcome of a row, and races.

These are plain functions, for any test runner. Those that need other sessions refuse to run where
they would test nothing: inside Django's ``TestCase``, whose rows are never committed, and on
SQLite, which has one lock for all rows.
"""

from __future__ import annotations

from .racing import race
from .settling import assert_settles, make_due

__all__ = ["assert_settles", "make_due", "race"]
