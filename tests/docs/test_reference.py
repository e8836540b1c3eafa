"""The tables of the reference say what the code says, no more and no less."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dcl_processor
from dcl_processor import BatchProcessor, Delivery, checks, exceptions, testing
from dcl_processor.decorator import Options
from dcl_processor.management.commands.processors import Command

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    text = (REFERENCE / page).read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    lines = text.split("\n#", 1)[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


def code(cell: str) -> str:
    return cell.strip("`").split()[0]


def test_every_option_is_listed_with_its_default() -> None:
    listed = {
        code(name): default.strip("`") for name, default, _ in rows("processors.md", "Options")
    }
    assert set(listed) == {"done", "failed", *Options.__annotations__}
    for name, default in listed.items():
        if name != "name":  # which is made from where the code is
            value = getattr(BatchProcessor, name)
            is_delivery = isinstance(value, Delivery)
            assert default == (f"Delivery.{value.name}" if is_delivery else repr(value)), name


def test_every_parameter_of_a_run_is_listed_with_its_default() -> None:
    listed = {
        code(name): default.strip("`")
        for name, default, _ in rows("processors.md", "Parameters of a run")
    }
    for method in (BatchProcessor.run, BatchProcessor.__call__):
        parameters = inspect.signature(method).parameters.values()
        assert listed == {
            each.name: repr(each.default) for each in parameters if each.kind is each.KEYWORD_ONLY
        }


@pytest.mark.parametrize("action", ["run", "list"])
def test_every_option_of_the_command_is_on_its_page(action: str) -> None:
    page = (REFERENCE / "command.md").read_text(encoding="utf-8")
    section = page.split(f"## processors {action}\n", 1)[1].split("\n## ", 1)[0]
    shown = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", re.split(r"```console", section)[0]))
    taken = {
        option
        for each in _parser(action)._actions
        if each.help != argparse.SUPPRESS
        for option in each.option_strings
        if option.startswith("--") and option != "--help"
    }
    assert shown <= taken, "the page shows options that there are not"
    assert taken - shown <= ({"--traceback", "--verbosity"} if action == "list" else set())


@pytest.mark.parametrize("name", sorted(set(dcl_processor.__all__)))
def test_every_public_name_has_its_docstring_on_a_page(name: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    assert re.search(rf":: dcl_processor\.{name}$", pages, re.MULTILINE)
    assert inspect.getdoc(getattr(dcl_processor, name))


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_of_the_test_kit_has_its_docstring_on_its_page(name: str) -> None:
    page = (REFERENCE / "testing.md").read_text(encoding="utf-8")
    assert re.search(rf":: dcl_processor\.testing\.{name}$", page, re.MULTILINE)
    assert inspect.getdoc(getattr(testing, name))


def test_every_error_says_when_it_is_raised() -> None:
    errors = [
        each
        for each in vars(exceptions).values()
        if inspect.isclass(each) and issubclass(each, exceptions.ProcessorError)
    ]
    assert len(errors) >= 8
    assert all(each.__dict__.get("__doc__") for each in errors)


def test_every_check_has_a_line_on_its_page() -> None:
    source = "".join(
        module.read_text(encoding="utf-8") for module in Path(checks.__path__[0]).glob("*.py")
    )
    ids = re.findall(r'id="(dcl_processor\.[EW]\d+)"', source)
    assert len(ids) == len(set(ids)) > 0
    assert [code(line[0]) for line in rows("checks.md", "System checks")] == sorted(ids)


def _parser(action: str) -> argparse.ArgumentParser:
    parser = Command().create_parser("manage.py", "processors")
    subparsers: Any = next(
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    return subparsers.choices[action]  # type: ignore[no-any-return]
