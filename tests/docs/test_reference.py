"""The reference has the names, parameters and defaults of the code, and no others."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Model
from django.dispatch import Signal
from prometheus_client import CollectorRegistry

import dcl_processor
from dcl_processor import (
    BatchProcessor,
    Delivery,
    Report,
    batch_processor,
    checks,
    columns,
    exceptions,
    ledger,
    signals,
    testing,
    worker_name,
)
from dcl_processor.contrib import celery, otel, prometheus
from dcl_processor.contrib.reservations import Reservation
from dcl_processor.decorator import Options
from dcl_processor.engine.trial import DryRun
from dcl_processor.insights import doctor
from dcl_processor.ledger.control import Pause, State
from dcl_processor.management.commands.processors import ACTIONS, Command
from dcl_processor.processor import RunParameters
from dcl_processor.report.report import Failure
from tests.docs.blocks import FOLLOWED
from tests.docs.signatures import parameters, shown, value_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PROCESSORS, RESULTS = "reference/processors.md", "reference/results.md"
LEDGER, MONITORING, TESTING = "howto/ledger.md", "howto/monitoring.md", "howto/testing.md"

#: A line of a list: names in code, and behind the colon what they mean.
ENTRY = re.compile(r"^- ((?:`[^`]+`(?:, | and )?)+): \S", re.MULTILINE)


def public(of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}


VALUES = {name: getattr(dcl_processor, name) for name in ("Retry", "Lease", "Snooze", "Discard")}
DATACLASSES: dict[str, tuple[str, Any]] = {
    "Report": (RESULTS, Report),
    "Failure": (RESULTS, Failure),
    "DryRun": (RESULTS, DryRun),
    "State": (LEDGER, State),
    "Pause": (LEDGER, Pause),
}
CALLABLES: dict[str, tuple[str, Callable[..., Any]]] = {
    "batch_processor": (PROCESSORS, batch_processor),
    "worker_name": (PROCESSORS, worker_name),
    **{name: (PROCESSORS, of) for name, of in public(BatchProcessor).items() if callable(of)},
    **{
        name: (PROCESSORS, of) for name, of in public(Reservation).items() if inspect.isfunction(of)
    },
    **{name: (PROCESSORS, of) for name, of in VALUES.items()},
    **{f"testing.{name}": (TESTING, getattr(testing, name)) for name in testing.__all__},
    **{
        f"ledger.{name}": (LEDGER, getattr(ledger, name))
        for name in ledger.__all__
        if inspect.isfunction(getattr(ledger, name))
    },
    "celery.run": ("howto/celery.md", celery.run.run),
    "polite_stop": ("howto/celery.md", celery.polite_stop),
    "register": (MONITORING, prometheus.register),
    "gauges_view": (MONITORING, prometheus.gauges_view),
    "instrument": (MONITORING, otel.instrument),
    "uninstrument": (MONITORING, otel.uninstrument),
}


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return what is below a heading."""
    found = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text(page), re.MULTILINE | re.DOTALL
    )
    assert found, f"{page} has no heading {heading}"
    return found[1]


def names(of: str) -> list[str]:
    """Return what the lines of a list are about, each of which has a meaning beside it."""
    return [name for heads in ENTRY.findall(of) for name in re.findall(r"`([^`]+)`", heads)]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head and the marks of code."""
    table = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table[2:]]


def test_every_option_is_listed_with_its_default() -> None:
    options = {"done", "failed", *Options.__annotations__}
    defaults = {name: value_of(getattr(BatchProcessor, name)) for name in options}
    defaults["name"] = '"<app label>.<name>"'  # made from where the code is
    listed = names(section(PROCESSORS, "Options"))
    assert sorted(listed) == sorted(f"{name}={default}" for name, default in defaults.items())


def test_every_parameter_of_a_run_is_listed() -> None:
    run = parameters(BatchProcessor.run)
    assert names(section(PROCESSORS, "Parameters of a run")) == run
    assert [*RunParameters.__annotations__] == run


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_callable_has_its_signature_on_its_page(name: str) -> None:
    page, of = CALLABLES[name]
    assert f"`{shown(name.rpartition('.')[2], of)}`" in text(page)


@pytest.mark.parametrize("name", VALUES)
def test_every_parameter_of_a_value_is_listed(name: str) -> None:
    heading = f"`{name}`" if name not in {"Snooze", "Discard"} else "`Snooze` and `Discard`"
    listed = names(section(PROCESSORS, heading))
    assert [each for each in listed if each in parameters(VALUES[name])] == parameters(VALUES[name])


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_and_property_is_listed(name: str) -> None:
    page, of = DATACLASSES[name]
    if page == RESULTS:
        below = section(page, name)
    else:
        below = text(page).split(f"\n- `{name}`: ", 1)[1].split("\n- `", 1)[0]
    listed = re.findall(r"`(\w+)(?:\(\))?`", below)
    properties = {each for each, value in public(of).items() if isinstance(value, property)}
    assert {each.name for each in dataclasses.fields(of)} | properties <= {*listed}


def test_the_pages_have_no_name_that_the_code_has_not() -> None:
    known = {name.rpartition(".")[2] for name in CALLABLES}
    known |= {each for _, of in DATACLASSES.values() for each in public(of)}
    assert {*dcl_processor.__all__} <= known | {
        *DATACLASSES,
        "BatchProcessor",
        "Delivery",
        "Reservation",
    }
    for page in (PROCESSORS, RESULTS, TESTING, LEDGER, "howto/celery.md"):
        called = {
            each.partition("(")[0] for each in names(text(page)) if "(" in each and "=(" not in each
        }
        assert called <= known, page


def test_every_delivery_is_listed() -> None:
    for each in Delivery:
        assert f"`{value_of(each)}` (`{each.value!r}`)" in section(PROCESSORS, "`Delivery`")


@pytest.mark.parametrize("model", [columns.RetryColumns, columns.LeaseColumn])
def test_every_column_of_the_abstract_models_is_listed(model: type[Model]) -> None:
    below = section(PROCESSORS, "Abstract models").split(f"`{model.__name__}`", 1)[1]
    for field in model._meta.local_fields:
        given = ", ".join(f"{name}={value!r}" for name, value in field.deconstruct()[3].items())
        assert f"`{field.name} = {type(field).__name__}({given})`" in below


def test_every_error_is_listed() -> None:
    errors = {
        name
        for name, each in vars(exceptions).items()
        if inspect.isclass(each) and issubclass(each, exceptions.ProcessorError)
    }
    assert len(errors) >= 8
    below = section(RESULTS, "Errors")
    assert {*names(below)} <= errors <= {*re.findall(r"`(\w+)`", below)}


def test_every_signal_is_listed() -> None:
    known = [name for name, each in vars(signals).items() if isinstance(each, Signal)]
    assert names(section(RESULTS, "Signals")) == known


def test_every_metric_is_listed_with_its_type_and_its_labels() -> None:
    registry = CollectorRegistry()
    prometheus.Counts(registry)
    made = zip(registry.collect(), registry._collector_to_names, strict=True)
    of_runs = [[sample_name(each), each.type, labels(metric)] for each, metric in made]
    assert [line[:3] for line in rows(MONITORING, "Metrics of runs")] == of_runs
    assert [line[:3] for line in rows(MONITORING, "Metrics of the database")] == [
        [each.name, each.type, labels(each)] for each in prometheus.gauges([])
    ]


def sample_name(metric: Any) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


def labels(metric: Any) -> str:
    return "`, `".join(metric._labelnames)


def options(of: str) -> set[str]:
    return {*re.findall(r"--[a-z]+(?:-[a-z]+)*", of)}


def common(action: str) -> set[str]:
    """Return the options that the page has once, above its actions."""
    of_all, _, rest = text("reference/command.md").partition("\n## ")[0].partition("and all but ")
    others, _, of_most = rest.partition(".")[0].partition(" take ")
    return options(of_all) | (set() if f"`{action}`" in others else options(of_most))


@pytest.mark.parametrize("action", [*ACTIONS])
def test_every_option_of_the_command_is_on_its_page(action: str) -> None:
    below = section("reference/command.md", f"processors {action}").split("```console")[0]
    shown = options(below) | common(action)
    taken = {
        option
        for each in _parser(action)._actions
        if each.help != argparse.SUPPRESS
        for option in each.option_strings
        if option.startswith("--") and option != "--help"
    }
    assert shown <= taken, "the page shows options that there are not"
    assert taken - shown <= (set() if action == "run" else {"--verbosity"})


def test_every_check_of_the_doctor_is_on_its_page() -> None:
    source = Path(doctor.__file__).read_text(encoding="utf-8")
    known = {*re.findall(r'(?:found\(|check=|"check": )"([a-z-]+)"', source)}
    below = section("reference/command.md", "processors doctor")
    assert {*re.findall(r"`([a-z-]+)`:\s", below.split("\n- ", 1)[1])} == known


def test_every_check_has_a_line_on_its_page() -> None:
    source = Path(checks.__file__).read_text(encoding="utf-8")
    ids = re.findall(r'"([EW]\d{3})"', source)
    assert len(ids) == len(set(ids)) > 0
    assert names(section(RESULTS, "System checks")) == sorted(ids)


def _parser(action: str) -> argparse.ArgumentParser:
    parser = Command().create_parser("manage.py", "processors")
    subparsers: Any = next(
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    return subparsers.choices[action]  # type: ignore[no-any-return]


# --- every block is executed, and every project that a page makes is made by a test


CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(?:\{code-block\} )?(\w+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_executed_or_says_that_it_is_not_python(page: Path) -> None:
    """No language that a reader would take for a checked example goes unchecked."""
    not_executed = {"sh", "text", "ini", "yaml", "include", "toctree", "figure", "glossary"}
    languages = set(FENCE.findall(page.read_text(encoding="utf-8")))
    assert languages <= {"python", "pycon", "console"} | not_executed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_that_shows_files_is_followed_by_a_test(page: Path) -> None:
    shows_files = "} python\n:caption: " in page.read_text(encoding="utf-8")
    assert shows_files == page.as_posix().endswith(FOLLOWED)
    tests = "".join(each.read_text(encoding="utf-8") for each in Path(__file__).parent.glob("*.py"))
    name = page.relative_to(CHECKOUT / "docs") if shows_files else None
    assert name is None or f'Reader("{name}"' in tests or f'"{name}": Recipe(' in tests
