"""Sphinx's configuration; warnings are errors (make docs)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dcl_processor  # after the path is set

project = "dcl_processor"
author = "dcl_processor contributors"
project_copyright = author
release = version = dcl_processor.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
nitpicky = False

html_theme = "furo"
html_title = f"dcl_processor {release}"
