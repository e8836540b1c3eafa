"""Settings of the workers; the variables say by which route they reach the database."""

from __future__ import annotations

import json
import os

DATABASES = {"default": json.loads(os.environ["CHAOS_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SECRET_KEY = "chaos needs no secret"  # noqa: S105
USE_TZ = True
TIME_ZONE = "UTC"

#: Processors write to the same columns, but no row is pending for two of them.
SILENCED_SYSTEM_CHECKS = ["dcl_processor.E010"]
INSTALLED_APPS = ["django.contrib.contenttypes", "dcl_processor", "tests", "tests.chaos"]
