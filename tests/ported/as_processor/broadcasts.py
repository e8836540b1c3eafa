from __future__ import annotations

from dcl_processor import batch_processor
from tests.ported import outside
from tests.ported.models import Member, Notification


@batch_processor(
    pending=lambda: Member.objects.filter(notifications__broadcast=False).distinct(),
    repeats=True,
)
def broadcast(member: Member) -> None:
    notes = list(member.notifications.filter(broadcast=False).order_by("pk"))
    outside.push(member.pk, [note.text for note in notes])
    Notification.objects.filter(pk__in=[note.pk for note in notes]).update(broadcast=True)
