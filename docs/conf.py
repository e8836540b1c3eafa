# ruff: noqa: INP001  # Sphinx reads this file by its path; the folder is no package
"""Sphinx's configuration; warnings are errors (make docs)."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The reference is generated from the docstrings: importing them needs an app registry, not a
# database.
settings.configure(INSTALLED_APPS=["dcl_processor"])
django.setup()

import dcl_processor  # noqa: E402  # after the path is set

project = "dcl_processor"
author = "dcl_processor contributors"
project_copyright = author
release = version = dcl_processor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"dcl_processor {release}"
