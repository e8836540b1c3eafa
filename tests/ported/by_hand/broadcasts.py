from __future__ import annotations

import logging
from collections import defaultdict

from django.db import transaction

from tests.ported import outside
from tests.ported.models import Notification

logger = logging.getLogger(__name__)


def broadcast() -> None:
    with transaction.atomic():
        waiting = (
            Notification.objects.select_for_update(skip_locked=True)
            .filter(broadcast=False)
            .order_by("member_id", "pk")
        )
        by_member: defaultdict[int, list[Notification]] = defaultdict(list)
        for note in waiting:
            by_member[note.member_id].append(note)
        for member, notes in by_member.items():
            try:
                with transaction.atomic():
                    outside.push(member, [note.text for note in notes])
                    pks = [note.pk for note in notes]
                    Notification.objects.filter(pk__in=pks).update(broadcast=True)
            except Exception:
                logger.exception("member %s was not reached", member)
