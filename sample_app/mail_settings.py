"""Where the shop's e-mails go, in the form of Django's settings."""

from __future__ import annotations

from typing import Any

import django
import environ
from django.core.exceptions import ImproperlyConfigured

# The EMAIL_* settings, and the names of the same options in Django 6.1's MAILERS.
MAILER_OPTIONS = {
    "smtp": {
        "EMAIL_HOST": "host",
        "EMAIL_PORT": "port",
        "EMAIL_HOST_USER": "username",
        "EMAIL_HOST_PASSWORD": "password",
        "EMAIL_USE_TLS": "use_tls",
        "EMAIL_USE_SSL": "use_ssl",
    },
    "filebased": {"EMAIL_FILE_PATH": "file_path"},
}


def mail_settings(env: environ.Env) -> dict[str, Any]:
    """Return the settings for EMAIL_URL, else for EMAIL_HOST and EMAIL_PORT, else the console."""
    try:
        if url := env.str("EMAIL_URL", default=""):
            return in_this_django(env.email_url_config(url))
        if host := env.str("EMAIL_HOST", default=""):
            return smtp_settings(host, env.int("EMAIL_PORT", default=25))
    except (ImproperlyConfigured, ValueError):
        pass  # the error may quote the password, and must not be shown as a cause
    else:
        return in_this_django({"EMAIL_BACKEND": "django.core.mail.backends.console.EmailBackend"})
    raise ImproperlyConfigured(
        "Expected an EMAIL_URL like smtp://user:password@host:25 or consolemail://, or an "
        "EMAIL_HOST and a number as EMAIL_PORT, got one that cannot be read: write special "
        "characters, such as / in a password, as %2F."
    )


def smtp_settings(host: str, port: int) -> dict[str, Any]:
    """Return the settings for a plain SMTP server."""
    return in_this_django(
        {
            "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
            "EMAIL_HOST": host,
            "EMAIL_PORT": port,
        }
    )


def in_this_django(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite EMAIL_* settings as MAILERS from Django 6.1 on, which deprecates EMAIL_*."""
    if django.VERSION < (6, 1):
        return config
    backend = config["EMAIL_BACKEND"]
    names = MAILER_OPTIONS.get(backend.split(".")[-2], {})
    options = {option: config[name] for name, option in names.items() if config.get(name)}
    return {"MAILERS": {"default": {"BACKEND": backend, "OPTIONS": options}}}
