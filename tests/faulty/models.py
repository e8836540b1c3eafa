from __future__ import annotations

from typing import ClassVar

from django.db import models


class Ghost(models.Model):
    """Has no table: no migration makes one, and the test databases do not know this app."""

    # Said, since the type checker reads the tests' own settings, which do not have this app.
    objects: ClassVar[models.Manager[Ghost]] = models.Manager()

    sent = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"ghost {self.pk}"
