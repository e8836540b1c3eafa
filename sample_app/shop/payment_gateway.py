"""Charges cards through a gateway without idempotency keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

import httpx2
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

ANSWER_WITHIN = 1.0  # seconds


class NotCharged(Exception):
    """The card was certainly not charged; the next attempt may succeed."""


class Refused(Exception):
    """The card was not charged, and never will be."""


class PaymentGateway:
    """The gateway at the other end of an HTTP connection."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def charge(self, order: int, amount: Decimal) -> str:
        """Charge the card of the order's customer, and return the gateway's ID of the charge.

        Raises ``NotCharged`` or ``Refused`` if that is certain. After any other error, only the
        gateway knows whether the card was charged.
        """
        try:
            answer = self._client.post("/charges", json={"order": order, "amount": str(amount)})
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise NotCharged(f"the gateway cannot be reached: {error}") from error
        if answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE:
            raise NotCharged("the gateway is busy")
        if answer.status_code == httpx2.codes.PAYMENT_REQUIRED:
            raise Refused("the card is refused")
        return str(answer.raise_for_status().json()["id"])

    def find_charge(self, order: int) -> str | None:
        """Return the gateway's ID of the order's charge, or None if there is none."""
        answer = self._client.get(f"/charges/{order}")
        if answer.status_code == httpx2.codes.NOT_FOUND:
            return None
        return str(answer.raise_for_status().json()["id"])


@contextmanager
def open_gateway(url: str = "") -> Iterator[PaymentGateway]:
    """Open the gateway at this URL, or at the settings' PAYMENTS_URL."""
    url = url or settings.PAYMENTS_URL
    if not url:
        raise ImproperlyConfigured(
            "Expected a PAYMENTS_URL like https://payments.example.com, got none; set it in the "
            "environment."
        )
    # The gateway's log then shows which process a charge came from.
    headers = {"User-Agent": f"shop/{os.getpid()}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=ANSWER_WITHIN) as client:
        yield PaymentGateway(client)
