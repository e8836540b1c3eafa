"""A name that other task queues give an option is refused with what to write instead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import QuerySet

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.exceptions import InvalidOption
from dcl_processor.options import names as gone
from tests.models import Parcel

PENDING = Parcel.objects.filter(sent=False)


class Send(BatchProcessor[Parcel]):
    done = {"sent": True}

    def pending(self) -> QuerySet[Parcel]:
        return PENDING.all()

    def process(self, row: Parcel, /) -> None: ...


def by_keyword(name: str) -> object:
    return Send(**{name: 3})


def by_decorator(name: str) -> object:
    options: dict[str, Any] = {"pending": PENDING, name: 3}
    return batch_processor(**options)(lambda row: None)


def in_a_class(name: str) -> object:
    return type("Send", (Send,), {name: 3})


@pytest.mark.parametrize("define", [by_keyword, by_decorator])
def test_each_name_is_refused_with_what_replaces_it(define: Callable[[str], object]) -> None:
    for name, instead in gone.OF_OTHERS.items():
        with pytest.raises(InvalidOption) as refused:
            define(name)
        assert str(refused.value).endswith(f" has no option {name!r}; {instead}.")


def test_no_name_is_an_option_at_the_same_time() -> None:
    assert not [name for name in gone.OF_OTHERS if hasattr(Send, name)]


def test_a_class_may_use_the_words_of_others_for_its_own() -> None:
    for name in gone.OF_OTHERS:
        assert in_a_class(name) is not None
