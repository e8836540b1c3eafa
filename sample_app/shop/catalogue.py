"""The shop's products, and order lines invented from them, because order files contain none."""

from __future__ import annotations

from decimal import Decimal
from random import Random

from sample_app.shop.models import Order, OrderLine

PRODUCTS = {
    "Green tea, 1 kg": Decimal("18.00"),
    "Honey, 12 jars": Decimal("54.50"),
    "Linen tablecloth": Decimal("39.90"),
    "Olive oil, 5 l": Decimal("47.25"),
    "Rye crackers, 20 packs": Decimal("21.35"),
    "Sea salt, 10 kg": Decimal("9.80"),
    "Walnuts, 3 kg": Decimal("33.00"),
}


def invent_lines(order: Order) -> list[OrderLine]:
    """Return one to three lines, always the same ones for the same order number."""
    chance = Random(order.number)  # noqa: S311 - nothing here is a secret
    return [
        OrderLine(order=order, product=product, quantity=chance.randint(1, 40), unit_price=price)
        for product, price in chance.sample(sorted(PRODUCTS.items()), chance.randint(1, 3))
    ]
