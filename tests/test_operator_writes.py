"""The rows that an operator chose, and whether they are as they were."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import models

from dcl_processor.operator.states import digest, is_same, plain

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def test_a_row_that_has_come_to_be_pending_is_as_it_was_seen_and_not_the_reverse() -> None:
    before, now = (digest([NOW, "x"], is_pending=each) for each in (False, True))
    assert is_same(before, now)
    assert not is_same(now, before)
    assert not is_same(before, digest([NOW, "y"], is_pending=True))


class Odd:
    """A value without a text of its own."""


class Encrypted(models.TextField):  # type: ignore[type-arg]
    def get_prep_value(self, value: Any) -> Any:
        raise AssertionError("each time another text")


class Coded(models.TextField):  # type: ignore[type-arg]
    def get_prep_value(self, value: Any) -> Any:
        return "code"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (models.TextField(), " at 0x1", " at 0x1"),
        (models.TextField(), None, None),
        (models.DecimalField(), Decimal("1.0"), "'1.0'"),
        (models.JSONField(), {"a": [1]}, "{'a': [1]}"),
        (models.JSONField(), {"a": Odd()}, None),
        (Encrypted(), b"secret", repr(str(b"secret"))),
        (Coded(), Odd(), "'code'"),
        (Encrypted(), Odd(), None),
    ],
    ids=repr,
)
def test_a_value_has_a_text_that_is_the_same_in_each_process(
    field: Any, value: Any, expected: str | None
) -> None:
    field.set_attributes_from_name("odd")
    assert plain(field, value) == expected
