"""What runs and operators have done."""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings

from dcl_processor.ledger.models import PERSON, TEXT, Record, Subject, name_of, records
from dcl_processor.options.worker import this_user
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report.errors import described, ends_the_run, shown
from dcl_processor.report.values import TEN_YEARS, as_timedelta, expect_seconds

logger = logging.getLogger("dcl_processor.operations")

#: The action of runs.
RUN = "run"

#: For how long a record is kept, unless the settings say otherwise.
KEEP = timedelta(days=14)


def add(processor: Subject, action: str, *, by: str = "", rows: int = 0, **texts: str) -> None:
    """Add what an operator has done; ``texts``: masked, and in one line.

    It is done already, so an error is logged, and not raised.
    """
    name, now = name_of(processor), DatabaseNow()
    kept = {column: shown(text, TEXT) for column, text in texts.items()}
    kept |= {"processor": name, "by": shown(by or this_user(), PERSON)}
    try:
        records().create(action=action, at=now, seen_at=now, rows=rows, **kept)
    except Exception as error:
        if ends_the_run(error):
            raise
        about = (name, action, described(error))
        logger.warning("%s: the ledger has no record of this %s: %s", *about)


def history(processor: Subject | None = None, *, limit: int = 50) -> list[Record]:
    """Return what runs and operators did last, the newest first.

    ``processor``: a processor, or its name; ``None``: all. ``limit``: the most records.
    """
    found = records().order_by("-seen_at", "-pk")
    if processor is not None:
        found = found.filter(processor=name_of(processor))
    return list(found[:limit])


def prune(older_than: timedelta | float | None = None) -> int:
    """Delete the records that were written last longer ago; return how many.

    ``older_than``: seconds (or a ``timedelta``); default: the setting
    ``DCL_PROCESSOR_LEDGER_KEEP``, or 14 days; with ``None`` as the setting nothing is deleted. Runs
    call it now and then.
    """
    setting = getattr(settings, "DCL_PROCESSOR_LEDGER_KEEP", KEEP)
    keep = setting if older_than is None else older_than
    if keep is None:
        return 0
    expect_seconds("expected DCL_PROCESSOR_LEDGER_KEEP", keep, most=TEN_YEARS)
    return records().filter(seen_at__lt=Later(-as_timedelta(keep))).delete()[0]
