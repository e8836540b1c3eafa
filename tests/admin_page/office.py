"""A site of a project's own that has a list with the mixin, and not the page of the processors."""

from __future__ import annotations

from django.contrib.admin import AdminSite
from django.urls import path

from sample_app.shop.admin import PaymentAdmin
from sample_app.shop.models import Payment

site = AdminSite("office")
site.register(Payment, PaymentAdmin)

urlpatterns = [path("office/", site.urls)]
