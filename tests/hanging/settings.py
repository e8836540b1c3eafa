"""Settings of commands whose processes end themselves within seconds."""

from __future__ import annotations

from dcl_processor.workers import monitor, supervisor
from tests.settings import *  # noqa: F403
from tests.settings import FEW_APPS

INSTALLED_APPS = [*FEW_APPS, "tests.hanging"]

monitor.GRACE = 1
monitor.PACE = 0.2
supervisor.SILENT = 2.0
