"""Loops of six real projects, by hand and as processors: the same rows come to the same end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from tests.ported import outside
from tests.ported.as_processor.broadcasts import broadcast
from tests.ported.as_processor.changes import sync
from tests.ported.as_processor.chats import answer
from tests.ported.as_processor.jobs import work as work_at_jobs
from tests.ported.as_processor.prices import push_prices
from tests.ported.as_processor.tasks import work as work_at_tasks
from tests.ported.by_hand import broadcasts, changes, chats, jobs, prices, tasks
from tests.ported.models import (
    Account,
    Change,
    ChatUpdate,
    Job,
    Member,
    Notification,
    Price,
    Task,
)

pytestmark = pytest.mark.django_db(transaction=True)

Loop = Callable[[], Any]


def both(by_hand: Loop, processor: Loop) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loop", [by_hand, processor], ids=["by hand", "as a processor"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep what the loops send; whatever contains "bad" fails, or is refused."""
    calls: list[str] = []

    def perform(payload: str) -> None:
        calls.append(payload)
        if "bad" in payload:
            raise ValueError(payload)

    def push(_: Any, texts: Sequence[str]) -> None:
        perform("+".join(texts))

    def mutate(changed: Sequence[tuple[str, int]]) -> list[str | None]:
        calls.extend(sku for sku, _ in changed)
        return ["refused" if "bad" in sku else None for sku, _ in changed]

    for stand_in in (perform, push, mutate):
        monkeypatch.setattr(outside, stand_in.__name__, stand_in)
    return calls


def three_runs(loop: Loop, model: Any) -> None:
    """Run the loop three times, with all rows that wait made due before each."""
    for _ in range(3):
        model.objects.update(next_attempt_at=None)
        loop()


@both(broadcasts.broadcast, broadcast)
def test_a_member_gets_one_broadcast_with_everything(loop: Loop, calls: list[str]) -> None:
    for texts in (["a", "b"], ["c", "bad"], ["d"]):
        member = Member.objects.create()
        for text in texts:
            Notification.objects.create(member=member, text=text)
    loop()
    assert calls == ["a+b", "c+bad", "d"]
    left = Notification.objects.filter(broadcast=False).order_by("pk")
    assert [each.text for each in left] == ["c", "bad"]


@both(changes.sync, sync)
def test_a_change_is_applied_once_or_rejected_for_good(loop: Loop) -> None:
    account = Account.objects.create(balance=5)
    closed = Account.objects.create(closed=True)
    for owner, amount in ((account, 3), (account, -100), (account, -8), (closed, 1)):
        Change.objects.create(account=owner, amount=amount)
    three_runs(loop, Change)
    states = Change.objects.order_by("pk").values_list("state", flat=True)
    assert [*states] == ["done", "rejected", "done", "rejected"]
    account.refresh_from_db()
    assert account.balance == 0


@both(tasks.work, work_at_tasks)
def test_a_task_has_a_priority_three_attempts_and_a_lease(loop: Loop, calls: list[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(tasks.CLAIM_TASK)
    now, hour = timezone.now(), timedelta(hours=1)
    Task.objects.create(payload="second", priority=1)
    Task.objects.create(payload="bad", priority=5)
    Task.objects.create(payload="first", priority=9)
    Task.objects.create(payload="held", leased_until=now + hour)
    Task.objects.create(payload="lapsed", attempts=1, leased_until=now - hour)
    Task.objects.create(payload="given up", attempts=3, leased_until=now - hour)
    three_runs(loop, Task)
    assert calls == ["first", "bad", "second", "lapsed", "bad", "bad"]
    assert dict(Task.objects.values_list("payload", "state")) == {
        "first": "done",
        "second": "done",
        "lapsed": "done",
        "bad": "failed",
        "given up": "failed",
        "held": "queued",
    }


@both(prices.push_prices, push_prices)
def test_each_price_has_a_result_of_its_own(loop: Loop, calls: list[str]) -> None:
    Price.objects.bulk_create(Price(sku=sku, amount=1) for sku in ("a", "bad", "b"))
    three_runs(loop, Price)
    assert calls == ["a", "bad", "b", "bad", "bad"]
    states = Price.objects.order_by("pk").values_list("sku", "state", "leased_until")
    assert [*states] == [("a", "shown", None), ("bad", "refused", None), ("b", "shown", None)]


@both(jobs.work, work_at_jobs)
def test_no_more_jobs_of_a_kind_run_than_its_limit(loop: Loop, calls: list[str]) -> None:
    """Two of a kind are at work elsewhere; one whose worker died counts no longer."""
    now, hour = timezone.now(), timedelta(hours=1)
    for kind, at in (("mail", hour), ("mail", hour), ("print", hour), ("print", -hour)):
        Job.objects.create(
            kind=kind, payload=f"{kind} held", state="running", attempts=1, leased_until=now + at
        )
    for kind in ("mail", "print", "bad"):
        Job.objects.create(kind=kind, payload=kind)
    three_runs(loop, Job)
    assert sorted(calls) == ["bad", "bad", "bad", "print", "print held"]
    assert Job.objects.get(kind="mail", state="new").attempts == 0
    assert Job.objects.get(kind="bad").state == "failed"


@both(chats.answer, answer)
def test_each_chat_is_answered_in_its_order(loop: Loop, calls: list[str]) -> None:
    """A failed update holds its chat until it is given up, and no other chat."""
    texts = {(1, 3): "1/3", (1, 1): "1/1", (2, 1): "2/1 bad", (1, 2): "1/2", (2, 2): "2/2"}
    for (chat, number), text in texts.items():
        ChatUpdate.objects.create(chat=chat, number=number, text=text)
    three_runs(loop, ChatUpdate)
    assert [text for text in calls if text.startswith("1/")] == ["1/1", "1/2", "1/3"]
    assert [text for text in calls if text.startswith("2/")] == ["2/1 bad"] * 3 + ["2/2"]
    assert set(ChatUpdate.objects.exclude(text="2/1 bad").values_list("state")) == {("done",)}
    assert ChatUpdate.objects.get(text="2/1 bad").state == "failed"
