"""What the core tells the edge while it works (a progress bar, metrics, tracing)."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent after each row that got a handler, once its transaction has ended.
#: ``sender``: the processor's class; ``processor``; ``pk``; ``outcome``: "processed", "failed",
#: "discarded" or "snoozed".
row_finished = Signal()

#: Sent at the end of each run, but of one that raises. ``sender``: the processor's class;
#: ``processor``; ``report``.
run_finished = Signal()
