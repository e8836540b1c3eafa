"""Settings of the suite with the driver psycopg2, which Django takes where psycopg is missing."""

from __future__ import annotations

import sys

from tests.settings import *  # noqa: F403  # the embedded server is started with psycopg

# An import of it fails from here on, as where it is not installed.
sys.modules["psycopg"] = None  # type: ignore[assignment]  # Python's own way to say so
