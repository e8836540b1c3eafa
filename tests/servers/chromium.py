"""The browser that the tests drive: Debian's, or that of the variable."""

from __future__ import annotations

import os
from pathlib import Path

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def is_installed() -> bool:
    return Path(CHROMIUM).exists()
