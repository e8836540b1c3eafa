"""Settings for the processes that the tests start."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.crash"]

# They are the same rows: a test runs one processor at a time.
SILENCED_SYSTEM_CHECKS = ["dcl_processor.E010"]
