"""The shop's database, in the form of Django's settings."""

from __future__ import annotations

import os
from typing import Any

import environ
from django.core.exceptions import ImproperlyConfigured


def database_settings(env: environ.Env) -> dict[str, Any]:
    """Return the settings for DATABASE_URL, or for the embedded PostgreSQL if there is none."""
    url = env.str("DATABASE_URL", default="")
    if not url:
        from sample_app.embedded import database_url  # needs a wheel, which DATABASE_URL avoids

        # Also set for the processes started from this one, so that they join the same server.
        url = os.environ["DATABASE_URL"] = database_url()
    scheme, colon, _ = url.partition(":")
    try:
        if colon and scheme in env.DB_SCHEMES:
            return dict(env.db_url_config(url))
        wrong = f"one that begins with {scheme!r}"
    except ValueError:
        # Show neither the error's text nor the error as a cause, because it quotes a part of the
        # URL, which may be the password.
        wrong = (
            "one that cannot be read (write special characters, such as / in a password, as %2F)"
        )
    raise ImproperlyConfigured(
        "Expected a DATABASE_URL like postgres://user:password@host:5432/name, mysql://… or "
        f"sqlite:////path, got {wrong}; correct it, or unset it to use the embedded PostgreSQL."
    )
