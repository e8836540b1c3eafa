"""A file that is written again each second, for as long as all workers are alive."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger("dcl_processor.operations")


class HealthFile:
    """The file at ``path``; a probe looks at its age, and people at its content."""

    def __init__(self, path: Path) -> None:
        # A handler may change the working directory.
        self.path = path.absolute()
        self._new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._is_failing = False

    def create(self, document: Mapping[str, Any]) -> None:
        """Write the file for the first time; raises ``OSError`` where it cannot be written."""
        try:
            self._write(document)
        except OSError:
            self._remove_new()
            raise

    def write(self, document: Mapping[str, Any]) -> None:
        """Replace the file; a full disk is logged once, and the next call tries again."""
        try:
            self._write(document)
        except OSError as error:
            self._remove_new()
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    "%s cannot be written, and gets old although the workers are alive: %s",
                    self.path,
                    error,
                )
        else:
            self._is_failing = False

    def remove(self) -> None:
        """Remove the file, as its writer ends."""
        with suppress(OSError):
            self.path.unlink()

    def _write(self, document: Mapping[str, Any]) -> None:
        self._remove_new()  # which a process that had this ID may have left
        # Under another name first, as a probe must not read half of it; and never through a link,
        # which any user may create in a folder that all may write to.
        new = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(new, "w", encoding="utf-8") as file:
            file.write(f"{json.dumps(document)}\n")
        self._new.replace(self.path)

    def _remove_new(self) -> None:
        with suppress(OSError):
            self._new.unlink()
