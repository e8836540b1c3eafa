"""Settings of the sample shop; values that differ between machines come from the environment."""

from __future__ import annotations

import environ

from sample_app.database_settings import database_settings
from sample_app.mail_settings import mail_settings

env = environ.Env()

DATABASES = {"default": database_settings(env)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SECRET_KEY = env.str("SECRET_KEY", default="a sample needs no secret; a real shop does")
DEBUG = env.bool("DEBUG", default=True)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1"])

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
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
ROOT_URLCONF = "sample_app.urls"
STATIC_URL = "static/"

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"

DEFAULT_FROM_EMAIL = "shop@example.com"
globals().update(mail_settings(env))

# The robots' names with their keys: ROBOT_KEYS=robot-1=secret,robot-2=other
ROBOT_KEYS = env.dict("ROBOT_KEYS", default={})

# The URLs of other companies' services; "make demo" starts its own services.
PAYMENTS_URL = env.str("PAYMENTS_URL", default="")
WAREHOUSE_URL = env.str("WAREHOUSE_URL", default="")
