"""The shop's back office."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from dcl_processor.admin_page.mixin import ProcessorAdminMixin
from sample_app.shop.models import (
    Cart,
    Customer,
    Invoice,
    Order,
    OrderLine,
    OrderNote,
    Payment,
    PrintedPage,
    StockReturn,
)
from sample_app.shop.processors import (
    capture_payments,
    expire_carts,
    note_overdue_orders,
    push_to_warehouse,
    send_shipped_emails,
)

if TYPE_CHECKING:
    CartAdminBase = admin.ModelAdmin[Cart]
    CustomerAdminBase = admin.ModelAdmin[Customer]
    InvoiceAdminBase = admin.ModelAdmin[Invoice]
    PaymentAdminBase = admin.ModelAdmin[Payment]
    PagesBase = admin.TabularInline[PrintedPage, Invoice]
    ReturnsBase = admin.TabularInline[StockReturn, Cart]
    OrderAdminBase = admin.ModelAdmin[Order]
    LinesBase = admin.TabularInline[OrderLine, Order]
    NotesBase = admin.TabularInline[OrderNote, Order]
else:
    CartAdminBase = CustomerAdminBase = InvoiceAdminBase = admin.ModelAdmin
    OrderAdminBase = PaymentAdminBase = admin.ModelAdmin
    LinesBase = NotesBase = PagesBase = ReturnsBase = admin.TabularInline


class Lines(LinesBase):
    """The lines of an order, on the order's page."""

    model = OrderLine
    extra = 0


class Notes(NotesBase):
    """The notes about an order, on the order's page."""

    model = OrderNote
    extra = 0
    readonly_fields = ("written_at",)


@admin.register(Customer)
class CustomerAdmin(CustomerAdminBase):
    """Customers, by code or company."""

    list_display = ("code", "company", "contact_name", "email")
    search_fields = ("code", "company", "contact_name")


@admin.register(Order)
class OrderAdmin(ProcessorAdminMixin, OrderAdminBase):
    """Orders, with the flags that the processors flip."""

    processors = (send_shipped_emails, note_overdue_orders, push_to_warehouse)

    list_display = (
        "number",
        "customer",
        "order_date",
        "required_date",
        "shipped_at",
        "shipped_email_sent",
        "overdue_noted",
        "in_warehouse",
    )
    list_filter = ("shipped_email_sent", "overdue_noted", "in_warehouse", "ship_country")
    list_select_related = ("customer",)
    search_fields = ("=number", "customer__company")
    autocomplete_fields = ("customer",)
    date_hierarchy = "order_date"
    inlines = (Lines, Notes)
    readonly_fields = ("leased_until", "attempts", "next_attempt_at", "last_error")


@admin.register(Payment)
class PaymentAdmin(ProcessorAdminMixin, PaymentAdminBase):
    """Payments, to look for payments in doubt."""

    processors = (capture_payments,)

    list_display = ("order", "amount", "state", "capturing_since", "charge_id", "attempts")
    list_filter = ("state",)
    list_select_related = ("order",)
    search_fields = ("=order__number", "charge_id")
    autocomplete_fields = ("order",)
    # The mixin adds what workers write; of a flip that is a function it does not know the columns.
    readonly_fields = ("charge_id",)


class Pages(PagesBase):
    """The pages that were printed of an invoice, on the invoice's page."""

    model = PrintedPage
    extra = 0
    readonly_fields = ("printed_at",)


@admin.register(Invoice)
class InvoiceAdmin(InvoiceAdminBase):
    """Invoices, with the flag that print_invoices flips."""

    list_display = ("order", "printed")
    list_filter = ("printed",)
    list_select_related = ("order",)
    search_fields = ("=order__number",)
    autocomplete_fields = ("order",)
    inlines = (Pages,)


class Returns(ReturnsBase):
    """What went back on the shelf, on the cart's page."""

    model = StockReturn
    extra = 0


@admin.register(Cart)
class CartAdmin(ProcessorAdminMixin, CartAdminBase):
    """Carts, with the flag that expire_carts flips."""

    processors = (expire_carts,)

    list_display = ("pk", "customer", "pieces", "touched_at", "expired")
    list_filter = ("expired",)
    list_select_related = ("customer",)
    search_fields = ("customer__company",)
    autocomplete_fields = ("customer",)
    inlines = (Returns,)
