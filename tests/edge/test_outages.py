"""A trouble is told once, and once that it is over."""

from __future__ import annotations

from dcl_processor.workers.outages import Outages
from dcl_processor.workers.spawned import Trouble

REFUSED = Trouble("expected the database 'default' to answer, got: connection refused")
STARTING = Trouble("expected the database 'default' to answer, got: starting up")
MISSING = Trouble("expected the table t, got none")


def test_a_server_that_comes_back_is_told_of_once() -> None:
    outages = Outages()
    told = [outages.is_news("a", trouble) for trouble in (REFUSED, REFUSED, STARTING)]
    assert told == [True, False, False]
    assert outages.end("a") is not None
    assert outages.end("a") is None
    assert outages.is_news("a", REFUSED)


def test_another_trouble_is_news() -> None:
    outages = Outages()
    assert outages.is_news("a", REFUSED)
    assert outages.is_news("a", MISSING)


def test_several_with_one_server_tell_of_it_once_and_the_last_that_it_is_over() -> None:
    outages = Outages()
    assert outages.is_news("a", REFUSED)
    assert not outages.is_news("b", STARTING)
    assert outages.end("a") is None
    assert outages.end("b") is not None
