"""What users may write for durations, numbers and the values of columns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F, Value
from django.db.models.functions import Now

from dcl_processor import values
from dcl_processor.exceptions import InvalidOption


@pytest.mark.parametrize(("written", "meant"), [(3, 3.0), (0.5, 0.5), (timedelta(minutes=1), 60.0)])
def test_a_duration_is_a_number_of_seconds_or_a_timedelta(
    written: float | timedelta, meant: float
) -> None:
    assert values.expect_seconds("expected timeout", written) == meant
    assert values.seconds(written) == meant
    assert values.as_timedelta(written) == timedelta(seconds=meant)


@pytest.mark.parametrize(
    ("bounds", "wrong", "words"),
    [
        ({}, -1, "from 0, or a timedelta, got -1."),
        ({}, timedelta(-1), "from 0, or a timedelta, got datetime.timedelta(days=-1)."),
        ({}, float("nan"), "from 0, or a timedelta, got nan."),
        ({}, True, "from 0, or a timedelta, got True."),
        ({}, None, "from 0, or a timedelta, got None."),
        ({}, "3", "from 0, or a timedelta, got '3'."),
        ({"above_zero": True}, 0, "above 0, or a timedelta, got 0."),
        ({"above_zero": True}, timedelta(0), "above 0, or a timedelta, got datetime.timedelta(0)."),
        ({"most": values.DAY}, 86_401, "from 0 to a day, or a timedelta, got 86401."),
        ({"most": values.TEN_YEARS}, float("inf"), "from 0 to ten years, or a timedelta, got inf."),
        ({"least": 0.5, "most": 90}, 0.4, "from 0.5 to 90, or a timedelta, got 0.4."),
        ({"fix": "; wait"}, -1, "from 0, or a timedelta, got -1; wait."),
    ],
)
def test_what_is_no_duration_is_refused_with_its_bounds(
    bounds: dict[str, Any], wrong: Any, words: str
) -> None:
    with pytest.raises(InvalidOption) as refused:
        values.expect_seconds("expected timeout", wrong, **bounds)
    assert str(refused.value) == f"expected timeout to be a number of seconds {words}"


@pytest.mark.parametrize("wrong", [0, 4, 1.5, 2.0, True, None, "2", timedelta(2)], ids=repr)
def test_what_is_no_whole_number_is_refused_with_its_bounds(wrong: Any) -> None:
    with pytest.raises(InvalidOption) as refused:
        values.expect_whole_number("expected x", wrong, of="rows", least=1, most=3)
    assert (
        str(refused.value) == f"expected x to be a whole number of rows from 1 to 3, got {wrong!r}."
    )


def test_constants_are_what_is_written_as_it_is() -> None:
    written = {"a": 1, "b": None, "c": F("a"), "d": Now(), "e": Value(1), "f": lambda: 1, "g": int}
    assert values.constants_of(written) == {"a": 1, "b": None}


def test_callables_are_called_when_the_values_are_written() -> None:
    name = F("name")
    resolved = values.resolve({"a": 1, "b": lambda: 2, "c": name})
    assert resolved == {"a": 1, "b": 2, "c": name}
    assert resolved["c"] is name
