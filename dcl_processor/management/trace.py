"""The trace of an action on rows: a record of the log, and one of the ledger if there is one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from dcl_processor import log_fields, oversight
from dcl_processor.masking import shown
from dcl_processor.processor import BatchProcessor
from dcl_processor.worker import this_user

from . import wording

#: Characters of the values, of the reason and of an error.
LONGEST = 300

logger = logging.getLogger("dcl_processor.operations")


@dataclass(frozen=True, slots=True)
class Trace:
    """What an operator has done, with which values and why; ``error``: what ended it."""

    processor: BatchProcessor[Any]
    action: str
    using: str | None
    values: str = ""
    reason: str = ""
    error: str = ""

    @classmethod
    def of(
        cls, processor: BatchProcessor[Any], action: str, options: dict[str, Any], *, error: str
    ) -> Trace:
        """Return the trace of an action with these options; secrets in texts are masked."""
        texts = (", ".join(options.get("set", [])), options.get("reason", ""), error)
        shown_texts = [shown(text, LONGEST) for text in texts]
        return cls(processor, action, options["using"], *shown_texts)

    def leave(self, rows: int, keys: str) -> None:
        """Record who has written to how many rows; ``keys``: the first of them.

        An error is logged and not raised, because the rows are written to already.
        """
        name, by = self.processor.name, this_user()
        extra = log_fields.fields(name, using=self.using, row_count=rows)
        said = wording.action(rows, keys, self.values, self.reason, self.error)
        log_fields.log(
            logger, logging.INFO, "%s: %s by %s: %s", name, self.action, by, said, extra=extra
        )
        if oversight.installed() is None:
            return
        from dcl_processor.ledger import reading

        try:
            reading.add_action(
                self.processor,
                self.action,
                by=by,
                rows=rows,
                keys=keys,
                values=self.values,
                reason=self.reason,
                error=self.error,
            )
        except Exception as error:  # noqa: BLE001  # as above
            message = "%s: the ledger has no record of this %s: %s"
            log_fields.log(logger, logging.WARNING, message, name, self.action, error, extra=extra)
