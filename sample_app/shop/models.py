"""Customers, their orders and carts, and the payments and invoices of orders."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from dcl_processor.columns import LeaseColumn, RetryColumns


class Customer(models.Model):
    """A customer of the shop."""

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
        """The addressee of a letter: a person, or the company if it names none."""
        return self.contact_name or self.company


class Order(LeaseColumn, RetryColumns):
    """One order, from the day it is placed to the day it is shipped and announced.

    push_to_warehouse uses the columns of the lease and of the attempts.
    """

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
    in_warehouse = models.BooleanField(default=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["number"]
        # Only pending rows are in these indexes, so that a query for pending rows costs the
        # same in a shop with a thousand orders and in one with ten million.
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
            models.Index(
                fields=["id"],
                name="shop_order_to_warehouse",
                condition=models.Q(in_warehouse=False),
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
    """A number of pieces of one product, at the price of the day."""

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


class Payment(RetryColumns):
    """The price of an order, and whether the customer's card has been charged for it."""

    class State(models.TextChoices):
        """The states: from DUE to CAPTURING, and then to one of the others."""

        DUE = "due"
        CAPTURING = "capturing"
        CAPTURED = "captured"
        REFUSED = "refused"

    order = models.OneToOneField(Order, on_delete=models.PROTECT, related_name="payment")
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    state = models.CharField(max_length=9, choices=State, default=State.DUE)
    capturing_since = models.DateTimeField(null=True, blank=True)
    charge_id = models.CharField(max_length=40, blank=True, help_text="The gateway's own name.")

    class Meta:
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["id"], name="shop_payment_due", condition=models.Q(state="due")),
            models.Index(
                fields=["capturing_since"],
                name="shop_payment_in_doubt",
                condition=models.Q(state="capturing"),
            ),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                name="shop_payment_charge_of_one_order",
                fields=["charge_id"],
                condition=~models.Q(charge_id=""),
            ),
            models.CheckConstraint(
                name="shop_payment_captured_has_charge",
                condition=~models.Q(state="captured") | ~models.Q(charge_id=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.amount} for order {self.order_id}"


class Robot(models.Model):
    """A robot in the hall; its row is locked while it is decided what the robot may hold."""

    name = models.CharField(max_length=80, unique=True)

    def __str__(self) -> str:
        return self.name


class Packing(LeaseColumn, RetryColumns):
    """The packing of an order, which a robot in the hall does."""

    class State(models.TextChoices):
        """The states: from WAITING to PACKING, and then to one of the others."""

        WAITING = "waiting"
        PACKING = "packing"
        PACKED = "packed"
        STUCK = "stuck"

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="packing")
    state = models.CharField(max_length=7, choices=State, default=State.WAITING)
    packing_since = models.DateTimeField(null=True, blank=True)
    packer = models.CharField(max_length=80, blank=True)
    #: The packer's robot holds it: it counts towards what the robot may hold.
    confirmed = models.BooleanField(default=False, editable=False)
    grams = models.PositiveIntegerField(null=True, blank=True)

    class Meta:
        indexes: ClassVar[list[models.Index]] = [
            # A packing that is being done stays pending, so that it is taken over when its robot
            # does not come back.
            models.Index(
                fields=["id"],
                name="shop_packing_open",
                condition=models.Q(state__in=["waiting", "packing"]),
            )
        ]

    def __str__(self) -> str:
        return f"Packing of order {self.order_id}"


class Invoice(models.Model):
    """The paper that goes into an order's parcel."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, related_name="invoice")
    printed = models.BooleanField(default=False)

    class Meta:
        indexes: ClassVar[list[models.Index]] = [
            models.Index(
                fields=["order"], name="shop_invoice_to_print", condition=models.Q(printed=False)
            )
        ]

    def __str__(self) -> str:
        return f"Invoice {self.pk}"


class PrintedPage(models.Model):
    """One printed page; an invoice has one page for each time that it was printed."""

    invoice = models.ForeignKey(Invoice, on_delete=models.CASCADE, related_name="pages")
    text = models.TextField()
    printed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"A page of invoice {self.invoice_id}"


class Cart(models.Model):
    """Pieces that a customer has put aside and may never buy."""

    customer = models.ForeignKey(Customer, on_delete=models.CASCADE, related_name="carts")
    pieces = models.PositiveIntegerField()
    touched_at = models.DateTimeField()
    expired = models.BooleanField(default=False)

    class Meta:
        indexes: ClassVar[list[models.Index]] = [
            models.Index(
                fields=["touched_at"], name="shop_cart_open", condition=models.Q(expired=False)
            )
        ]

    def __str__(self) -> str:
        return f"Cart {self.pk}"


class StockReturn(models.Model):
    """Pieces of an expired cart that others may buy again."""

    cart = models.ForeignKey(Cart, on_delete=models.CASCADE, related_name="returns")
    pieces = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.pieces} back on the shelf"
