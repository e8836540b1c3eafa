"""What the environment says about the database and the mail, as Django's settings."""

from __future__ import annotations

import django
import pytest
from django.core import mail
from django.core.mail.backends.smtp import EmailBackend
from django.test import override_settings
from environ import Env

from sample_app.database_settings import database_settings
from sample_app.mail_settings import mail_settings


def given(**variables: str) -> Env:
    """Return an environment of these variables alone."""
    env = Env()
    env.ENVIRON = variables
    return env


def settings_of(**variables: str) -> dict[str, object]:
    """Return the settings in the words of before Django 6.1."""
    settings = mail_settings(given(**variables))
    if django.VERSION < (6, 1):
        return settings
    mailer = settings["MAILERS"]["default"]
    return {"EMAIL_BACKEND": mailer["BACKEND"]} | {
        f"EMAIL_{name.upper()}": value for name, value in mailer["OPTIONS"].items()
    }


def test_mail_goes_to_the_console_unless_the_environment_says_where() -> None:
    assert settings_of() == {"EMAIL_BACKEND": "django.core.mail.backends.console.EmailBackend"}


@pytest.mark.parametrize(
    "variables",
    [
        {"EMAIL_HOST": "mail.example.com", "EMAIL_PORT": "2525"},
        {"EMAIL_URL": "smtp://mail.example.com:2525", "EMAIL_HOST": "not.this.one"},
    ],
)
def test_mail_goes_to_the_host_that_the_environment_names(variables: dict[str, str]) -> None:
    settings = settings_of(**variables)

    assert settings["EMAIL_BACKEND"] == "django.core.mail.backends.smtp.EmailBackend"
    assert (settings["EMAIL_HOST"], settings["EMAIL_PORT"]) == ("mail.example.com", 2525)


def test_the_settings_make_the_mail_backend_that_they_mean() -> None:
    url = "smtp+tls://shop:secret@mail.example.com:587"
    with override_settings(**mail_settings(given(EMAIL_URL=url))):
        backend = mail.get_connection() if django.VERSION < (6, 1) else mail.mailers.default

    assert isinstance(backend, EmailBackend)
    assert (backend.host, backend.port) == ("mail.example.com", 587)
    assert (backend.username, backend.password) == ("shop", "secret")
    assert backend.use_tls


@pytest.mark.parametrize(
    ("url", "engine"),
    [
        ("postgres://me:secret@db.example.com:5432/shop", "django.db.backends.postgresql"),
        ("mysql://me:secret@db.example.com/shop", "django.db.backends.mysql"),
        ("sqlite:////tmp/shop", "django.db.backends.sqlite3"),
    ],
)
def test_the_database_is_the_one_that_the_environment_names(url: str, engine: str) -> None:
    assert database_settings(given(DATABASE_URL=url))["ENGINE"] == engine
