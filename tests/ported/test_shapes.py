"""Each shape of a loop as a processor, on rows with the result that such a loop has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F

from dcl_processor import BatchProcessor
from dcl_processor.checks import check_found
from dcl_processor.registry import Found
from tests.ported import outside
from tests.ported.models import Account, Item
from tests.ported.shapes.claims import lease
from tests.ported.shapes.shape import Shape, names_of
from tests.ported.shapes.table import FAMILIES, SHAPES
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "loops.md"

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def succeed_or_fail(payload: str, calls: list[str]) -> None:
    if "never" in payload:
        raise LookupError(payload)
    if "bad" in payload:
        raise ValueError(payload)
    if payload == "moves" and payload not in calls:
        Item.objects.filter(name=payload).update(priority=F("priority") + 1)
    calls.append(payload)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep the calls that succeed; "bad" is a failure, and "never" one that does not pass.

    The row "moves" gets a new version during its first call.
    """
    calls: list[str] = []

    def perform(payload: str) -> None:
        succeed_or_fail(payload, calls)

    def ask(payload: str) -> str:
        perform(payload)
        return payload.upper()

    def push(_: Any, texts: Sequence[str]) -> None:
        perform("+".join(texts))

    def mutate(changes: Sequence[tuple[str, int]]) -> list[str | None]:
        calls.append("+".join(name for name, _ in changes))
        return ["refused" if "bad" in name else None for name, _ in changes]

    for stand_in in (perform, ask, push, mutate):
        monkeypatch.setattr(outside, stand_in.__name__, stand_in)
    return calls


def assert_end(shape: Shape, calls: list[str]) -> None:
    assert shape.found() == dict(shape.end)
    assert shape.found_buried() == [*shape.buried]
    if shape.ordered:
        assert calls == [*shape.calls]
    else:
        assert sorted(calls) == sorted(shape.calls)


def make_due() -> None:
    Item.objects.update(next_attempt_at=None)


@each_shape
def test_a_shape_comes_to_its_end(shape: Shape, calls: list[str]) -> None:
    shape.make_rows()
    for _ in range(shape.rounds):
        together(shape.processor(), shape.workers)
        make_due()
    assert_end(shape, calls)


def test_the_page_has_the_lines_of_all_shapes() -> None:
    lines = sum(len(shape.source()) for shape in SHAPES)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"The {len(SHAPES)} processors have {lines} lines" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_each_module_has_the_shapes_of_its_family(family: str) -> None:
    assert names_of(family) == [shape.name for shape in SHAPES if shape.family == family]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_processor_has_anything_that_the_checks_report(family: str) -> None:
    module = vars(import_module(f"tests.ported.shapes.{family}"))
    processors = [each for each in module.values() if isinstance(each, BatchProcessor)]
    assert processors
    assert [message for each in processors for message in check_found([Found(each, "here")])] == []


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_the_same_shapes(family: str) -> None:
    shapes = [shape.loop for shape in SHAPES if shape.family == family]
    assert [loop for loop, _, _ in table(FAMILIES[family])] == shapes


@each_shape
def test_the_processor_uses_the_options_that_the_page_names(shape: Shape) -> None:
    [options] = [
        options for loop, options, _ in table(FAMILIES[shape.family]) if loop == shape.loop
    ]
    source = " ".join(shape.source())
    if "no `done`" in options:
        assert not re.search(r"\bdone ?=", source)
        options = options.replace("no `done`", "")
    named = re.findall(r"`([a-zA-Z_]+)[^`]*`", options)
    assert [name for name in named if not re.search(rf"\b{name}\b", source)] == []


def one_item() -> None:
    Item.objects.create(name="a", owner=Account.objects.create())


def test_the_flip_of_a_leased_row_is_written_over_a_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of the limits that the page names."""
    one_item()

    def cancel(_: str) -> None:
        Item.objects.update(state="cancelled")

    monkeypatch.setattr(outside, "perform", cancel)
    assert lease().processed == 1
    assert Item.objects.get().state == "done"
