"""Customers, their orders, and what is in them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Customer(models.Model):
    """Somebody who orders."""

    code = models.CharField(max_length=20, unique=True)
    company = models.CharField(max_length=80)
    contact_name = models.CharField(max_length=80, blank=True)
    email = models.EmailField()

    class Meta:
        ordering: ClassVar[list[str]] = ["code"]

    def __str__(self) -> str:
        return f"{self.company} ({self.code})"

    @property
    def greeting_name(self) -> str:
        """Who a letter is addressed to: not every company names a person."""
        return self.contact_name or self.company


class Order(models.Model):
    """One order, from the day it is placed to the day it is shipped and announced."""

    number = models.PositiveBigIntegerField(unique=True, help_text="The source's order number.")
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="orders")
    order_date = models.DateField()
    required_date = models.DateField()
    shipped_at = models.DateTimeField(null=True, blank=True)
    freight = models.DecimalField(max_digits=10, decimal_places=2)
    ship_city = models.CharField(max_length=60, blank=True)
    ship_country = models.CharField(max_length=60, blank=True)
    shipped_email_sent = models.BooleanField(default=False)
    overdue_noted = models.BooleanField(default=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["number"]
        # Only pending rows are in these indexes, so that asking "is there anything to do?"
        # costs the same in a shop with a thousand orders and in one with ten million.
        indexes: ClassVar[list[models.Index]] = [
            models.Index(
                fields=["id"],
                name="shop_order_email_due",
                condition=models.Q(shipped_at__isnull=False, shipped_email_sent=False),
            ),
            models.Index(
                fields=["required_date"],
                name="shop_order_overdue",
                condition=models.Q(shipped_at__isnull=True, overdue_noted=False),
            ),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                name="shop_order_required_not_before_ordered",
                condition=models.Q(required_date__gte=models.F("order_date")),
            )
        ]

    def __str__(self) -> str:
        return f"Order {self.number}"


class OrderLine(models.Model):
    """So many pieces of one product, at the price of the day."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="lines")
    product = models.CharField(max_length=80)
    quantity = models.PositiveIntegerField()
    unit_price = models.DecimalField(max_digits=10, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.quantity} {self.product}"


class OrderNote(models.Model):
    """What customer service should know about an order."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="notes")
    text = models.TextField()
    written_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.text
