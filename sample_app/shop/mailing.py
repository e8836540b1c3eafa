"""The connection for the shop's e-mails."""

from __future__ import annotations

import django
from django.core import mail
from django.core.mail.backends.base import BaseEmailBackend


def mail_connection() -> BaseEmailBackend:
    """Return a connection that is open inside a `with` block, for many mails."""
    # Django 6.1 deprecates get_connection() in favour of the mailers.
    return mail.get_connection() if django.VERSION < (6, 1) else mail.mailers.default
