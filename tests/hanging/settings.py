"""Settings of commands whose supervisor loses its patience within seconds."""

from __future__ import annotations

from dcl_processor.engine import calls
from dcl_processor.processes import monitor
from tests.settings import *  # noqa: F403
from tests.settings import FEW_APPS

INSTALLED_APPS = [*FEW_APPS, "tests.hanging"]

calls.GRACE = 1.0
monitor.KILLED_SILENT = 3.0
monitor.PACE = 0.2
