"""One broadcast for each member and run, with all that waits for that member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest

from dcl_processor.testing import race
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.ported import by_hand, outside
from tests.ported.as_processor.broadcasts import broadcast
from tests.ported.by_hand import broadcasts
from tests.ported.models import Member, Notification
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)

Pushed = list[tuple[Any, list[str]]]

each_way = pytest.mark.parametrize(
    "loop", [broadcasts.broadcast, broadcast], ids=["by hand", "as a processor"]
)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Pushed:
    """Keep what is pushed; the text "offline" cannot be."""
    pushed: Pushed = []

    def push(member: Any, texts: Sequence[str]) -> None:
        pushed.append((member, list(texts)))
        if "offline" in texts:
            raise ConnectionError

    monkeypatch.setattr(outside, "push", push)
    return pushed


def members(*texts: Sequence[str]) -> list[Member]:
    """Make a member for each sequence of texts, with a notification for each text."""
    made = [Member.objects.create(name=f"member {number}") for number in range(len(texts))]
    for member, own in zip(made, texts, strict=True):
        for text in own:
            notify(member, text)
    return made


def notify(member: Member, text: str) -> None:
    Notification.objects.create(member=member, text=text)


@each_way
def test_a_member_gets_one_broadcast_with_everything(
    loop: Callable[[], Any], pushed: Pushed
) -> None:
    one, two, _ = members(["a", "b"], ["c"], [])
    loop()
    assert pushed == [(one.pk, ["a", "b"]), (two.pk, ["c"])]
    loop()
    assert len(pushed) == 2
    notify(one, "d")
    loop()
    assert pushed[2:] == [(one.pk, ["d"])]
    assert not Notification.objects.filter(broadcast=False).exists()


@each_way
def test_a_member_who_cannot_be_reached_costs_the_others_nothing(
    loop: Callable[[], Any], pushed: Pushed
) -> None:
    one, two = members(["a", "offline"], ["b"])
    loop()
    assert pushed == [(one.pk, ["a", "offline"]), (two.pk, ["b"])]
    assert set(Notification.objects.filter(broadcast=False).values_list("text", flat=True)) == {
        "a",
        "offline",
    }


@each_way
def test_workers_together_push_each_text_once(loop: Callable[[], Any], pushed: Pushed) -> None:
    members(*[[f"{number}"] * 2 for number in range(12)])
    together(loop)
    assert sorted(text for _, texts in pushed for text in texts) == sorted(
        [f"{number}" for number in range(12)] * 2
    )
    assert not Notification.objects.filter(broadcast=False).exists()


def test_in_a_race_of_processors_each_member_has_one_broadcast(pushed: Pushed) -> None:
    made = members(["a", "b"], ["c", "d"], ["e", "f"])
    race(broadcast, copies=3).raise_for_failures()
    assert sorted(pushed) == [
        (member.pk, texts)
        for member, texts in zip(made, (["a", "b"], ["c", "d"], ["e", "f"]), strict=True)
    ]


def meet(
    loop: Callable[[], Any], second: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[list[str]], Any]:
    """Let a text arrive while a worker pushes, and then let another worker run.

    Return the member, what was pushed while the first push was under way, and what the other said.
    """
    (member,) = members(["a"])
    pushing, go_on = Event(), Event()
    pushed: list[list[str]] = []

    def push(_: Any, texts: Sequence[str]) -> None:
        pushed.append(list(texts))
        if len(pushed) == 1:
            pushing.set()
            the.wait(go_on)

    monkeypatch.setattr(outside, "push", push)
    with the.meanwhile(loop):
        try:
            the.wait(pushing)
            notify(member, "b")
            said = second()
            at_once = list(pushed)
        finally:
            go_on.set()
    return member, at_once, said


def test_by_hand_two_broadcasts_to_one_member_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop locks the notifications that it found, and not the member."""
    loop = by_hand.broadcasts.broadcast
    _, at_once, _ = meet(loop, loop, monkeypatch)
    assert at_once == [["a"], ["b"]]


def test_a_processor_leaves_the_member_to_the_worker_that_pushes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, at_once, report = meet(broadcast, lambda: broadcast(wait_for_locked=0), monkeypatch)
    assert at_once == [["a"]]
    assert_run(report, skipped=1)
    assert_run(broadcast(), processed=1)
    assert not Notification.objects.filter(broadcast=False).exists()
