"""The shop's back office."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from sample_app.shop.models import Customer, Order, OrderLine, OrderNote

if TYPE_CHECKING:
    CustomerAdminBase = admin.ModelAdmin[Customer]
    OrderAdminBase = admin.ModelAdmin[Order]
    LinesBase = admin.TabularInline[OrderLine, Order]
    NotesBase = admin.TabularInline[OrderNote, Order]
else:
    CustomerAdminBase = OrderAdminBase = admin.ModelAdmin
    LinesBase = NotesBase = admin.TabularInline


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
class OrderAdmin(OrderAdminBase):
    """Orders, with the two flags that the processors flip."""

    list_display = (
        "number",
        "customer",
        "order_date",
        "required_date",
        "shipped_at",
        "shipped_email_sent",
        "overdue_noted",
    )
    list_filter = ("shipped_email_sent", "overdue_noted", "ship_country")
    list_select_related = ("customer",)
    search_fields = ("=number", "customer__company")
    autocomplete_fields = ("customer",)
    date_hierarchy = "order_date"
    inlines = (Lines, Notes)
