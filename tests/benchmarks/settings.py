"""Settings of the benchmarks' processes; ``scratch`` says where the database is."""

from __future__ import annotations

import environ

env = environ.Env()
DATABASES = {"default": env.db_url_config(env.str("DATABASE_URL"))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SECRET_KEY = "the benchmarks need no secret"  # noqa: S105
USE_TZ = True
TIME_ZONE = "UTC"

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "dcl_processor",
    "dcl_processor.ledger",
    "tests",
    "tests.benchmarks",
]

DCL_PROCESSOR_LEDGER = False  # a contender switches it on

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "root": {"level": "ERROR", "handlers": []},
}
