"""Updates of chats: one at a time for each chat, in the order in which they were numbered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.utils import timezone

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.ported import outside
from tests.ported.as_processor.chats import answer
from tests.ported.by_hand import chats
from tests.ported.models import ChatUpdate
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)

each_way = pytest.mark.parametrize(
    "loop", [chats.answer, answer], ids=["by hand", "as a processor"]
)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep what is answered; what ends with "bad" fails."""
    answered: list[str] = []

    def perform(text: str) -> None:
        answered.append(text)
        if text.endswith("bad"):
            raise ValueError(text)

    monkeypatch.setattr(outside, "perform", perform)
    return answered


def update(chat: int, number: int, text: str = "", **values: Any) -> ChatUpdate:
    text = text or f"{chat}/{number}"
    return ChatUpdate.objects.create(chat=chat, number=number, text=text, **values)


def states() -> dict[str, str]:
    return dict(ChatUpdate.objects.values_list("text", "state"))


def make_due() -> None:
    ChatUpdate.objects.update(next_attempt_at=None)


@each_way
def test_each_chat_is_answered_in_its_order(loop: Callable[[], Any], answered: list[str]) -> None:
    """Whatever the order of the primary keys is."""
    for number in (3, 1, 2):
        update(1, number)
        update(2, number)
    loop()
    for chat in (1, 2):
        own = [text for text in answered if text.startswith(f"{chat}/")]
        assert own == [f"{chat}/{number}" for number in (1, 2, 3)]
    assert set(states().values()) == {"done"}
    loop()
    assert len(answered) == 6


@each_way
def test_an_update_that_fails_blocks_its_chat_until_it_is_given_up(
    loop: Callable[[], Any], answered: list[str]
) -> None:
    update(1, 1, "1/1 bad")
    update(1, 2)
    update(2, 1)
    for attempt in (1, 2):
        loop()
        assert states() == {"1/1 bad": "new", "1/2": "new", "2/1": "done"}
        assert ChatUpdate.objects.get(text="1/1 bad").attempts == attempt
        loop()
        assert answered.count("1/1 bad") == attempt
        make_due()
    loop()
    assert states() == {"1/1 bad": "failed", "1/2": "done", "2/1": "done"}
    assert sorted(answered) == ["1/1 bad"] * 3 + ["1/2", "2/1"]


@each_way
def test_an_update_whose_worker_died_is_answered_before_the_next_one(
    loop: Callable[[], Any], answered: list[str]
) -> None:
    marked = {} if loop is answer else {"state": "running"}
    ago = timezone.now() - timedelta(hours=1)
    update(1, 1, attempts=1, leased_until=ago, **marked)
    update(1, 2)
    loop()
    assert answered == ["1/1", "1/2"]


@each_way
def test_workers_together_answer_each_update_once(
    loop: Callable[[], Any], answered: list[str]
) -> None:
    for number in range(1, 4):
        for chat in range(4):
            update(chat, number)
    together(loop)
    loop()
    assert sorted(answered) == sorted(states())
    assert set(states().values()) == {"done"}


def test_six_hundred_updates_of_forty_chats_in_three_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing twice, nothing lost, no two of a chat at work, none before an earlier one."""
    log: list[tuple[str, str]] = []

    def perform(text: str) -> None:
        log.append(("begins", text))
        log.append(("ends", text))

    monkeypatch.setattr(outside, "perform", perform)
    rows = [
        ChatUpdate(chat=chat, number=number, text=f"{chat}/{number}")
        for number in range(15)
        for chat in range(40)
    ]
    ChatUpdate.objects.bulk_create(rows)
    together(answer)
    answer()
    assert set(states().values()) == {"done"}
    began = [text for what, text in log if what == "begins"]
    assert len(began) == len(set(began)) == 600
    assert audit(log) == (0, 1)


def audit(log: list[tuple[str, str]]) -> tuple[int, int]:
    """Return the inversions of a log, and the most rows of a chat that were in flight at once."""
    last: defaultdict[str, int] = defaultdict(lambda: -1)
    in_flight: defaultdict[str, int] = defaultdict(int)
    inversions = most = 0
    for what, text in log:
        chat, _, number = text.partition("/")
        if what == "ends":
            in_flight[chat] -= 1
            continue
        inversions += int(number) < last[chat]
        last[chat] = int(number)
        in_flight[chat] += 1
        most = max(most, in_flight[chat])
    return inversions, most


def test_the_audit_finds_an_inversion_and_two_of_a_chat_at_work() -> None:
    wrong = [("begins", "1/2"), ("begins", "1/1"), ("ends", "1/1"), ("ends", "1/2")]
    assert audit(wrong) == (1, 2)


def meet(
    loop: Callable[[], Any], second: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Any]:
    """Commit an earlier update of a chat while a later one is answered, and run another worker.

    Return what was answered while the first answer was under way, and what the other said.
    """
    update(1, 2)
    here, go_on = Event(), Event()
    answered: list[str] = []

    def perform(text: str) -> None:
        answered.append(text)
        if text == "1/2":
            here.set()
            the.wait(go_on)

    monkeypatch.setattr(outside, "perform", perform)
    with the.meanwhile(loop):
        try:
            the.wait(here)
            update(1, 1)
            said = second()
            at_once = list(answered)
        finally:
            go_on.set()
    return at_once, said


def test_by_hand_an_update_that_is_committed_late_is_answered_beside_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop asks for earlier updates, and locks nothing that the two have in common."""
    at_once, _ = meet(chats.answer, chats.answer, monkeypatch)
    assert at_once == ["1/2", "1/1"]


def test_a_processor_leaves_a_late_update_until_the_chat_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, report = meet(answer, lambda: answer(wait_for_locked=0), monkeypatch)
    assert at_once == ["1/2"]
    assert_run(report, held=1)
    answer()
    assert states() == {"1/1": "done", "1/2": "done"}
