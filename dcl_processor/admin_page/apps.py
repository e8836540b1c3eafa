"""The app, which is optional: ``"dcl_processor.admin_page"`` in ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig


class AdminPageConfig(AppConfig):
    name = "dcl_processor.admin_page"
    label = "dcl_admin"
    verbose_name = "Batch processors"
    default_auto_field = "django.db.models.BigAutoField"
