"""The values that operators' writes compare: their texts are the same in each process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.db import models

from dcl_processor.operator_marks import plain
from sample_app.shop.models import Payment
from tests.models import Errand

NOW = datetime(2026, 11, 23, tzinfo=UTC)
FIELD = Errand._meta.get_field("result")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (each, each)
            for each in (None, True, 1, 1.5, " at 0x1", Decimal("1.0"), NOW, UUID(int=1))
        ),
        (memoryview(b"\0"), b"\0"),
        (bytearray(b"\0"), b"\0"),
        ((1, [memoryview(b"a")]), [1, [b"a"]]),
        ({"b": [1], "a": (2,)}, [["a", [2]], ["b", [1]]]),
        (OrderedDict(b=1, a=2), [["a", 2], ["b", 1]]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (Payment.State.DUE, "due"),
    ],
    ids=repr,
)
def test_values_in_plain_types(value: Any, expected: Any) -> None:
    found = plain(FIELD, value, "default")
    assert (found, repr(found)) == (expected, repr(expected))


def test_a_value_in_plain_types_is_not_given_to_its_field() -> None:
    class Encrypted(models.TextField):  # type: ignore[type-arg]
        def get_prep_value(self, value: Any) -> Any:
            raise AssertionError("each time another text")

    assert plain(Encrypted(), "secret", "default") == "secret"


def test_a_field_that_refuses_in_any_way_is_passed_over() -> None:
    class Odd(models.TextField):  # type: ignore[type-arg]
        def get_prep_value(self, value: Any) -> Any:
            return 1 // 0

        def value_to_string(self, obj: Any) -> str:
            return "the text"

    field = Odd()
    field.set_attributes_from_name("odd")
    assert plain(field, object(), "default") == "the text"


def test_an_object_in_a_container_has_no_plain_type() -> None:
    field = models.JSONField(name="data")
    field.set_attributes_from_name("data")
    assert plain(field, {"a": object()}, "default") is None


def test_the_text_of_a_set_is_the_same_in_each_process() -> None:
    code = (
        "from dcl_processor.operator_marks import plain\n"
        "print(plain(None, {'one', 'two', 'three', 'four'}, ''))"
    )
    texts = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2", "3")
    }
    assert texts == {"['four', 'one', 'three', 'two']\n"}
