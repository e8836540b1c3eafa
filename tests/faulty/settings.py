"""Settings for the commands that the tests start, and that fail."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.warehouse", "tests.faulty"]
