"""What the shop does with its orders, once each."""

from __future__ import annotations

from django.core.mail import EmailMessage
from django.db.models import QuerySet
from django.utils import timezone

from dcl_processor import BatchProcessor, batch_processor
from sample_app.shop.models import Order


@batch_processor(
    pending=lambda: Order.objects.filter(
        shipped_at__isnull=False, shipped_email_sent=False
    ).select_related("customer"),
    done={"shipped_email_sent": True},
)
def send_shipped_emails(order: Order) -> None:
    """Tell the customer that the order is on its way."""
    EmailMessage(
        subject=f"Your order {order.number} has shipped",
        body=f"Dear {order.customer.greeting_name},\n\nyour order {order.number} is on its way.\n",
        to=[order.customer.email],
        headers={"X-Order": str(order.number)},
    ).send()


class NoteOverdueOrders(BatchProcessor[Order]):
    """Leave customer service one note about each order that is late and has not shipped."""

    done = {"overdue_noted": True}

    def pending(self) -> QuerySet[Order]:
        """Return the orders past their required date, as of today."""
        return Order.objects.filter(
            shipped_at__isnull=True, overdue_noted=False, required_date__lt=timezone.localdate()
        )

    def process(self, order: Order, /) -> None:
        """Write the note: it and the flag are one transaction, so there is exactly one."""
        order.notes.create(text=f"Was due on {order.required_date}, and has not shipped.")


note_overdue_orders = NoteOverdueOrders()
