"""Settings for the commands that the tests start."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import FEW_APPS

INSTALLED_APPS = [*FEW_APPS, "tests.warehouse"]
