"""The shop's processors of orders, payments and carts, each with its delivery guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend
from django.db.models import DateTimeField, F, QuerySet
from django.db.models.functions import Cast
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.exceptions import AttemptsUsedUp
from sample_app.shop.mailing import mail_connection
from sample_app.shop.models import Cart, Invoice, Order, Payment, StockReturn
from sample_app.shop.payment_gateway import NotCharged, PaymentGateway, Refused, open_gateway
from sample_app.shop.warehouse import Warehouse, open_warehouse

CART_KEPT = timedelta(days=30)


@batch_processor(
    pending=lambda: Order.objects.filter(
        shipped_at__isnull=False, shipped_email_sent=False
    ).select_related("customer"),
    done={"shipped_email_sent": True},
    pending_since="shipped_at",
    resource=mail_connection,
)
def send_shipped_emails(order: Order, connection: BaseEmailBackend) -> None:
    """Send an e-mail for each shipped order."""
    mail = EmailMessage(
        subject=f"Your order {order.number} has shipped",
        body=f"Dear {order.customer.greeting_name},\n\nyour order {order.number} is on its way.\n",
        to=[order.customer.email],
        headers={"X-Order": str(order.number)},
    )
    connection.send_messages([mail])


class NoteOverdueOrders(BatchProcessor[Order]):
    """Note each order whose shipment is late."""

    done = {"overdue_noted": True}
    pending_since = Cast("required_date", DateTimeField())

    def pending(self) -> QuerySet[Order]:
        """Return the orders past their required date, as of today."""
        return Order.objects.filter(
            shipped_at__isnull=True, overdue_noted=False, required_date__lt=timezone.localdate()
        )

    def process(self, order: Order, /) -> None:
        """Write the note: it and the flag are one transaction, so there is exactly one note."""
        order.notes.create(text=f"Was due on {order.required_date}, and has not shipped.")


note_overdue_orders = NoteOverdueOrders()


class CapturePayments(BatchProcessor[Payment]):
    """Charge a card at most once per shipped order."""

    name = "shop.capture_payments"
    delivery = Delivery.AT_MOST_ONCE
    claim = {"state": Payment.State.CAPTURING}
    claimed_at = "capturing_since"
    done = {"state": Payment.State.CAPTURED}
    failed = {"state": Payment.State.REFUSED}
    reset = {"state": Payment.State.DUE}
    retry = Retry(max_attempts=4, backoff=1, on=NotCharged)
    pending_since = F("order__shipped_at")

    def pending(self) -> QuerySet[Payment]:
        """Return the payments that are due for orders that have shipped."""
        return Payment.objects.filter(
            state=Payment.State.DUE, order__shipped_at__isnull=False
        ).select_related("order")

    def resource(self) -> AbstractContextManager[PaymentGateway]:
        """Open the gateway."""
        return open_gateway()

    def process(self, payment: Payment, gateway: PaymentGateway, /) -> str:
        """Charge the card, and return the gateway's ID of the charge."""
        return gateway.charge(payment.order.number, payment.amount)

    def get_done(self, payment: Payment, charge_id: str, /) -> Mapping[str, Any]:
        """Store the charge in the same write as the state."""
        return {**super().get_done(payment, charge_id), "charge_id": charge_id}

    def get_failed(self, payment: Payment, error: Exception, /) -> Mapping[str, Any]:
        """Refuse only payments that are certainly not charged; leave the others in doubt."""
        if isinstance(error, (NotCharged, Refused, AttemptsUsedUp)):
            return super().get_failed(payment, error)
        # The state stays as the claim wrote it, and in_doubt() returns the row for a person.
        return {"capturing_since": payment.capturing_since}


capture_payments = CapturePayments()


@batch_processor(
    pending=lambda: Order.objects.filter(
        in_warehouse=False, payment__state=Payment.State.CAPTURED
    ).prefetch_related("lines"),
    done={"in_warehouse": True},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(10),
    retry=Retry(max_attempts=6, backoff=1),
    pending_since="shipped_at",
    resource=open_warehouse,
)
async def push_to_warehouse(order: Order, warehouse: Warehouse) -> None:
    """Announce each paid order to the warehouse."""
    await warehouse.take(order)


class ExpireCarts(BatchProcessor[Cart]):
    """Put the pieces of old carts on the shelf."""

    name = "shop.expire_carts"
    batch_size = 100
    done = {"expired": True}
    pending_since = F("touched_at") + CART_KEPT

    def pending(self) -> QuerySet[Cart]:
        """Return the open carts that were not touched for ``CART_KEPT``."""
        return Cart.objects.filter(expired=False, touched_at__lt=timezone.now() - CART_KEPT)

    def process_batch(self, carts: Sequence[Cart], /) -> None:
        """Write all returns at once; they and the flags are one transaction."""
        StockReturn.objects.bulk_create(
            StockReturn(cart=cart, pieces=cart.pieces) for cart in carts
        )


expire_carts = ExpireCarts()


@batch_processor(
    pending=lambda: Order.objects.filter(
        shipped_at__isnull=False, invoice__printed=False
    ).select_related("customer", "invoice"),
    batch_size=25,
    pending_since="shipped_at",
)
def print_invoices(order: Order) -> None:
    """Print the invoice that goes into the parcel."""
    text = f"Invoice for order {order.number}\n{order.customer.company}\n"
    order.invoice.pages.create(text=text)
    Invoice.objects.filter(pk=order.invoice.pk).update(printed=True)
