"""Sends orders to the warehouse, which recognises an order that it received before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from environ import Env

from sample_app.shop.models import Order

#: Seconds.
ANSWER_WITHIN = Env().float("WAREHOUSE_ANSWER_WITHIN", 1.0)


class Warehouse:
    """The warehouse at the other end of HTTP connections."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def take(self, order: Order) -> None:
        """Hand the order over; raise an HTTPError unless the warehouse confirms it."""
        lines = [{"product": line.product, "quantity": line.quantity} for line in order.lines.all()]
        answer = await self._client.put(
            f"/orders/{order.number}",
            json={"city": order.ship_city, "country": order.ship_country, "lines": lines},
            # An order that arrives twice is packed once.
            headers={"Idempotency-Key": str(order.number)},
        )
        answer.raise_for_status()


@asynccontextmanager
async def open_warehouse() -> AsyncIterator[Warehouse]:
    """Open the warehouse at the settings' WAREHOUSE_URL."""
    if not settings.WAREHOUSE_URL:
        raise ImproperlyConfigured(
            "Expected a WAREHOUSE_URL like https://warehouse.example.com, got none; set it in "
            "the environment."
        )
    async with httpx2.AsyncClient(base_url=settings.WAREHOUSE_URL, timeout=ANSWER_WITHIN) as client:
        yield Warehouse(client)
