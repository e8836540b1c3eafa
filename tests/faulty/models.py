from __future__ import annotations

from django.db import models


class Ghost(models.Model):
    """Has no table: no migration makes one, and the test databases do not know this app."""

    sent = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"ghost {self.pk}"
