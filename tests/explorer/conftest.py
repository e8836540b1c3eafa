"""The gates are PostgreSQL's: elsewhere no predicate is asked between a snapshot and a lock."""

from __future__ import annotations

from django.db import connection

from tests import notes

collect_ignore_glob = [] if connection.vendor == "postgresql" else ["*.py"]

_notes = notes.of_each_test
