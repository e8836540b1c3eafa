"""The signals that a run sends, for a progress bar, metrics or tracing."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent after each row for which a handler was called, once its transaction has ended.
#: ``sender``: the processor's class; ``processor``; ``pk``; ``outcome``: "processed", "failed",
#: "discarded" or "snoozed".
row_finished = Signal()

#: Sent at the end of each run, except a run that raises. ``sender``: the processor's class;
#: ``processor``; ``report``.
run_finished = Signal()
