"""The bar, the rate and the charts, from the counts that an address carries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.template.loader import render_to_string
from hypothesis import given
from hypothesis import strategies as st

from dcl_processor.admin_page.pace import FEW, Estimate, Expected, Pace, pace, parse, rates, text_of
from dcl_processor.admin_page.views import chart
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
        (0, "No row waits."),
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


MORE = Answer(10_000, How.MORE_THAN)


def test_above_the_count_the_bar_and_the_rate_are_by_the_planners_estimate() -> None:
    first = pace((), 1000.0, MORE, Expected(1_000_000, as_of=900.0, gone=0, rate=None))
    assert (first.peak, first.handled, first.rate) == (1_000_000, 0, None)
    assert first.is_estimated
    assert "it needs a run that the ledger records" in first.words

    # The planner's number grows with the table's file, and tells nothing new without an ANALYZE.
    then = Expected(1_090_000, as_of=900.0, gone=123_456, rate=50.0)
    second = pace(first.points, 1100.0, MORE, then)
    assert (second.peak, second.now, second.rate) == (1_000_000, 876_544, 50.0)
    assert second.position == "~123,500 of ~1,000,000 (12 %)"
    assert second.words == "50 rows per second; about 4 h left at this rate."


def test_a_new_estimate_corrects_the_earlier_ones_and_leaves_what_was_handled() -> None:
    before = ((1000.0, Estimate(100_000)),)
    found = pace(before, 1010.0, MORE, Expected(490_000, as_of=1005.0, gone=10_000, rate=1000.0))
    assert (found.peak, found.handled, found.now) == (500_000, 10_000, 490_000)
    assert found.points[0] == (1000.0, 500_000)


def test_without_a_ledger_two_new_estimates_give_a_rate_and_an_old_one_does_not() -> None:
    def looked(before: tuple[tuple[float, int], ...], at: float, rows: int, as_of: float) -> Pace:
        return pace(before, at, MORE, Expected(rows, as_of=as_of))

    first = looked((), 1000.0, 900_000, 10.0)
    # Hours may lie between these two, so that the difference has no known time.
    second = looked(first.points, 1005.0, 500_000, 1003.0)
    assert (second.handled, second.rate) == (400_000, None)
    third = looked(second.points, 1065.0, 440_000, 1064.0)
    assert third.rate == 1000.0
    assert looked(third.points, 1066.0, 470_000, 1064.0).now == 440_000


def test_the_rate_is_that_of_the_last_two_minutes() -> None:
    found = pace(((1000.0, 9_000), (4000.0, 1_000), (4050.0, 500)), 4100.0, Answer(0))
    assert found.rate == 10.0


def test_an_address_carries_the_first_count_and_the_latest() -> None:
    points = tuple((1000.0 + each, 100 - each) for each in range(20))
    late = points[9:]
    text = text_of({"shop.a@b,c": points, "ü": late, "none": ()}, FEW)
    kept = points[-FEW + 1 :]
    assert parse(text, ["shop.a@b,c", "ü", "none"]) == {
        "shop.a@b,c": (points[0], *kept),
        # The first count of a processor that was not known at the first look.
        "ü": ((points[0][0], late[0][1]), *kept),
    }
    # Of other processors, or in another order, the counts are not known.
    assert parse(text, ["ü", "shop.a@b,c", "none"]) == {}
    assert parse(text, ["shop.a@b,c"]) == {}


@given(
    st.dictionaries(
        st.sampled_from(["a", "b,", "ü", "\ud800"]),
        st.lists(
            st.tuples(
                st.integers(0, 9), st.integers(0, 10_000) | st.integers(0, 2**40).map(Estimate)
            ),
            max_size=6,
        ).map(tuple),
    ),
    st.integers(1, 4),
)
def test_what_was_written_is_read(seen: dict[str, tuple[tuple[float, int], ...]], cut: int) -> None:
    text = text_of(seen, FEW)
    for points in parse(text, [*seen]).values():
        assert list(points) == sorted(points)
        assert pace(points, 3e9, Answer(5)).handled >= 0
        rates(points)
        chart("x", "x", "rows", points)
    assert not parse(text[:-cut], [*seen])


def test_a_time_of_another_day_has_its_date() -> None:
    """Recorded runs are up to two weeks old."""
    now = datetime.now(UTC).replace(microsecond=0)
    old = now - timedelta(days=13)
    found = chart("pace", "Throughput", "rows", [(old.timestamp(), 1), (now.timestamp(), 2)])
    assert found is not None
    assert found.rows == [(old, f"{old:%Y-%m-%d %H:%M:%S}", "1"), (now, f"{now:%H:%M:%S}", "2")]
    assert found.summary == (
        f"Throughput: 1 at {old:%Y-%m-%d %H:%M:%S}, 2 at {now:%H:%M:%S} UTC, 2 at most."
    )
    page = render_to_string("dcl_admin/chart.html", {"chart": found})
    assert f'datetime="{old.isoformat()}">{old:%Y-%m-%d %H:%M:%S}</time>' in page
    assert f">{now:%H:%M:%S}</time>" in page
