"""Gets a process ready from which victims are forked: Django is set up, no connection is open."""

from __future__ import annotations

import django

django.setup()

from tests.crash import processors, victims  # noqa: E402, F401  # they need the models
