"""Leaves SQLite out, whose triggers have one answer only."""

from __future__ import annotations

from django.db import connection

collect_ignore = ["test_matrix.py"] if connection.vendor == "sqlite" else []
