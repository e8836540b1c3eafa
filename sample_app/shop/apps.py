"""The shop as a Django app."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """Customers and their orders."""

    name = "sample_app.shop"
    label = "shop"
    default_auto_field = "django.db.models.BigAutoField"
