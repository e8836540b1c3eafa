"""Settings of the benchmarks' processes; ``scratch`` says where the database is."""

from __future__ import annotations

from importlib.util import find_spec

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
    # Contenders that are installed only in the benchmarks' own environment.
    *(app for app in ("django_tasks", "django_tasks_db", "mailer") if find_spec(app)),
]

DCL_PROCESSOR_LEDGER = False  # a contender switches it on

TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}

EMAIL_BACKEND = "mailer.backend.DbBackend"
MAILER_EMAIL_BACKEND = "tests.benchmarks.contenders.django_mailer.Handing"
MAILER_USE_FILE_LOCK = False  # its documentation: not needed where the database locks rows

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "root": {"level": "ERROR", "handlers": []},
}
