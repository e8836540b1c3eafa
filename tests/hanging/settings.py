"""Settings of commands whose processes end themselves within seconds."""

from __future__ import annotations

from dcl_processor.workers import health
from tests.settings import *  # noqa: F403
from tests.settings import FEW_APPS

INSTALLED_APPS = [*FEW_APPS, "tests.hanging"]

health.GRACE = 1
health.PACE = 0.2
