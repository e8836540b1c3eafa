"""An outage is reported when it begins, when its cause changes, each hour, and when it is over."""

from __future__ import annotations

import pytest

from dcl_processor.diagnosis import Trouble
from dcl_processor.management.watching import ErrorDedup

REFUSED = Trouble("expected the database 'default' to answer, got: connection refused")
PASSWORD = Trouble("expected the database 'default' to answer, got: wrong password")


def test_a_server_that_comes_back_is_told_of_once() -> None:
    outages = ErrorDedup()
    assert outages.say("a", REFUSED) == REFUSED.sentence
    assert [outages.say("a", REFUSED) for _ in range(5)] == [None] * 5
    assert outages.end("a") is not None
    assert outages.end("a") is None
    assert outages.say("a", REFUSED)


def test_another_cause_of_the_same_trouble_is_news_and_the_outage_goes_on() -> None:
    outages = ErrorDedup()
    said = [outages.say("a", each) for each in (REFUSED, REFUSED, PASSWORD, PASSWORD, REFUSED)]
    assert said == [REFUSED.sentence, None, PASSWORD.sentence, None, REFUSED.sentence]
    assert outages.end("a") is not None


def test_one_that_lasts_is_told_of_each_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("dcl_processor.steady.monotonic", lambda: now)
    outages = ErrorDedup()
    said = []
    for _ in range(4 * 60):
        said.append(outages.say("a", REFUSED))
        outages.say("b", REFUSED)
        now += 60
    told = [each for each in said if each]
    assert told == [
        REFUSED.sentence,
        f"after 61 tries in 1.0 hours, still: {REFUSED.sentence}",
        f"after 121 tries in 2.0 hours, still: {REFUSED.sentence}",
        f"after 181 tries in 3.0 hours, still: {REFUSED.sentence}",
    ]


def test_several_with_one_server_tell_of_it_once_and_the_last_that_it_is_over() -> None:
    outages = ErrorDedup()
    assert outages.say("a", REFUSED)
    assert not outages.say("b", REFUSED)
    assert outages.end("a") is None
    assert outages.end("b") is not None
