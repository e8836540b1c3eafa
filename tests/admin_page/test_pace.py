"""The bar, the rate and the charts, from the counts that an address carries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dcl_processor.admin_page.panels import FEW, pace, parse, text_of
from dcl_processor.admin_page.views import MOST, chart
from dcl_processor.insights.answer import Answer, How


def test_a_bar_and_a_rate_need_two_counts() -> None:
    first = pace((), 1000.0, Answer(90))
    assert (first.peak, first.handled, first.rate) == (90, 0, None)

    second = pace(first.points, 1010.0, Answer(60))
    assert (second.peak, second.handled, second.rate) == (90, 30, 3.0)
    assert second.words == "3 rows per second; about 20 s left at this rate."


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (90, "The number has not changed."),
        (100, "Falling behind by 1 rows per second."),
        (85, "30.0 rows per minute; about 2 min left at this rate."),
    ],
)
def test_the_rate_in_words(count: int, words: str) -> None:
    assert pace(((1000.0, 90),), 1010.0, Answer(count)).words == words


@pytest.mark.parametrize(
    "answer", [Answer(10_000, How.MORE_THAN), Answer.unknown("not within 1 s")]
)
def test_a_number_that_is_not_known_has_no_bar(answer: Answer[int]) -> None:
    found = pace(((1000.0, 90),), 1010.0, answer)
    assert (found.peak, found.rate) == (None, None)
    assert found.points == ((1000.0, 90),)


def test_the_rate_is_that_of_the_last_two_minutes() -> None:
    found = pace(((1000.0, 9_000), (4000.0, 1_000), (4050.0, 500)), 4100.0, Answer(0))
    assert found.rate == 10.0


def test_an_address_carries_the_first_count_and_the_latest() -> None:
    points = tuple((1000.0 + each, 100 - each) for each in range(20))
    text = text_of({"shop.a@b,c": points, "none": ()}, 3)
    assert parse(text, ["shop.a@b,c", "none"]) == {
        "shop.a@b,c": (points[0], *points[-2:]),
        "none": (),
    }
    # Of other processors, or in another order, the counts are not known.
    assert parse(text, ["none", "shop.a@b,c"]) == {}
    assert parse(text, ["shop.a@b,c"]) == {}
    assert parse(text[:-1], ["shop.a@b,c", "none"]) == {}


def test_the_address_of_many_processors_is_taken_by_servers() -> None:
    seen = {
        f"shop.processor_{each}": (
            (1_764_250_000.5, 9_000 - 7 * each),
            (1_764_250_900.5, 31 * each),
        )
        for each in range(MOST)
    }
    assert len(text_of(seen, FEW)) < 3_500


def test_a_chart_says_in_words_what_it_shows() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    later = at + timedelta(days=13)
    found = chart([(at.timestamp(), 1_000), (later.timestamp(), 200)])
    assert found is not None
    assert found.rows == ((at, 1_000), (later, 200))
    assert found.summary == (
        "Pending rows: 1,000 at 2026-01-02 03:04:05 UTC, 200 at 2026-01-15 03:04:05 UTC, "
        "1,000 at most."
    )
