"""Settings of the suite: ``DATABASE_URL`` says which database, unset the embedded PostgreSQL."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import environ

env = environ.Env()
url = env.str("DATABASE_URL", default="")
if not url:
    from sample_app.embedded import database_url

    url = database_url("postgres")  # only test databases are written to

# Two runs at once share the server, never a database.
RUN = f"dcl_{secrets.token_hex(4)}"

default: dict[str, Any] = env.db_url_config(url)
if default["ENGINE"].endswith("sqlite3"):
    # A file, since threads and child processes of the tests connect to it too.
    default["TEST"] = {"NAME": str(Path(tempfile.gettempdir()) / f"{RUN}.sqlite3")}
else:
    default["TEST"] = {"NAME": f"test_{RUN}"}

DATABASES = {
    "default": default,
    # Connections of its own to the same test database: what using= chooses.
    "other": {**default, "TEST": {"MIRROR": "default"}},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SECRET_KEY = "the tests need no secret"  # noqa: S105
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "sample_app.urls"
STATIC_URL = "static/"
PAYMENTS_URL = WAREHOUSE_URL = ""  # tests that want one start it
ROBOT_KEYS: dict[str, str] = {}

# Processors of the tests share tables on purpose, and need no retry beside a lease.
SILENCED_SYSTEM_CHECKS = ["dcl_processor.W011", "dcl_processor.W012"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "dcl_processor",
    "dcl_processor.admin_page",
    "dcl_processor.ledger",
    "sample_app.shop",
    "tests",
    "tests.instances",
    "tests.kinds",
]
#: Enough for processes that tests start: each other app costs each of them a part of its start.
FEW_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "dcl_processor",
    "sample_app.shop",
    "tests",
]
# Tests of it switch it on; the others are to show what a run does without it.
DCL_PROCESSOR_LEDGER = False
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "tests.admin_page.policy.strict_policy",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
