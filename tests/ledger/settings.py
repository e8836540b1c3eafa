"""Settings for the commands that the tests of the ledger start."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.warehouse"]
DCL_PROCESSOR_LEDGER = True
