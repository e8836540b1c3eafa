"""The shop's pages: the admin, and what the robots that pack orders call."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from sample_app.shop import packing_views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("packings/pull", packing_views.pull),
    path("packings/renew", packing_views.renew),
    path("packings/settle", packing_views.settle),
    path("packings/fail", packing_views.fail),
    path("packings/release", packing_views.release),
    path("", RedirectView.as_view(pattern_name="admin:index")),
]
