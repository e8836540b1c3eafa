"""The page in the admin's site: no list of rows, but the views of ``views``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, HttpResponseNotAllowed
from django.urls import URLPattern, path

from dcl_processor.admin_page import acting, views
from dcl_processor.admin_page.models import Processor

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Processor]
else:
    Base = admin.ModelAdmin


@admin.register(Processor)
class ProcessorAdmin(Base):
    """Registers the page; for a site of your own: ``site.register(Processor, ProcessorAdmin)``."""

    actions = None

    def get_urls(self) -> list[URLPattern]:
        """Return the page's addresses, and none of those for rows of a table."""
        one = "<path:object_id>"
        addresses = {
            "changelist": ("", "index", acting.may_view),
            "act": (f"{one}/act/", "act", acting.may_operate),
            # The admin's log links to this name.
            "change": (f"{one}/change/", "detail", acting.may_view),
        }
        return [
            path(route, self._view(view, may), name=f"dcl_admin_processor_{name}")
            for name, (route, view, may) in addresses.items()
        ]

    def _view(
        self, name: str, may: Callable[[HttpRequest], bool]
    ) -> Callable[..., HttpResponseBase]:
        def view(request: HttpRequest, **named: Any) -> HttpResponseBase:
            acting.require(may(request))
            if may is acting.may_operate and request.method != "POST":
                return HttpResponseNotAllowed(["POST"])
            response: HttpResponseBase = getattr(views, name)(self, request, **named)
            return response

        # It checks the user and the token of a POST. The time limits of the questions, and the
        # commits of chunks, need transactions of their own.
        checked: Any = self.admin_site.admin_view(view)
        found: Callable[..., HttpResponseBase] = transaction.non_atomic_requests(checked)
        return found

    def has_view_permission(self, request: HttpRequest, obj: Processor | None = None) -> bool:  # noqa: ARG002  # Django's signature
        """Return whether the user may see processors."""
        return acting.may_view(request)

    def has_add_permission(self, request: HttpRequest, obj: Processor | None = None) -> bool:  # noqa: ARG002  # as above
        """Return False: processors are code."""
        return False

    has_module_permission = has_view_permission
    has_change_permission = has_delete_permission = has_add_permission
