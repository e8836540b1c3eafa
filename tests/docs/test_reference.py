"""The reference has the names, signatures, types and defaults of the code, and no others."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Model
from django.dispatch import Signal

import dcl_processor
from dcl_processor import (
    BatchProcessor,
    Delivery,
    Report,
    Reservation,
    batch_processor,
    checks,
    columns,
    exceptions,
    insights,
    ledger,
    signals,
    testing,
    worker_name,
)
from dcl_processor.contrib import celery, otel, prometheus
from dcl_processor.contrib.prometheus import exposition, gauges
from dcl_processor.decorator import Options
from dcl_processor.ledger.acted import RecordedAction
from dcl_processor.ledger.records import Recorded
from dcl_processor.ledger.standing import Pause, State
from dcl_processor.management.commands.processors import MODULES, Command
from dcl_processor.report import DryRun, Failure
from dcl_processor.testing.racing import Race
from tests.docs.signatures import shown, type_of, value_of

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def public(of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}


METHODS = {name: each for name, each in public(BatchProcessor).items() if callable(each)}
VALUES = {
    name: getattr(dcl_processor, name)
    for name in ("Retry", "Lease", "Breaker", "Snooze", "Discard")
}
DATACLASSES: dict[str, tuple[str, Any]] = {
    "Report": ("report.md", Report),
    "Failure": ("report.md", Failure),
    "DryRun": ("report.md", DryRun),
    "Race": ("testing.md", Race),
    "State": ("ledger.md", State),
    "Pause": ("ledger.md", Pause),
    "Recorded": ("ledger.md", Recorded),
    "RecordedAction": ("ledger.md", RecordedAction),
}
# What there is no signature of: a value that runs give, a base class, an enumeration.
OTHERS = {"BatchProcessor", "Delivery", "Report", "Reservation"}

CALLABLES: dict[str, tuple[str, Callable[..., Any]]] = {
    "batch_processor": ("processors.md", batch_processor),
    **{name: ("processors.md", each) for name, each in {**METHODS, **VALUES}.items()},
    **{name: ("testing.md", getattr(testing, name)) for name in testing.__all__},
    **{
        f"{kind}.{name}": (page, each)
        for kind, (page, of) in DATACLASSES.items()
        for name, each in public(of).items()
        if inspect.isfunction(each)
    },
    **{
        f"Reservation.{name}": ("processors.md", each)
        for name, each in public(Reservation).items()
        if inspect.isfunction(each)
    },
    "celery.run": ("celery.md", celery.run.run),
    "every": ("celery.md", celery.every),
    "worker_name": ("processors.md", worker_name),
    **{
        name: ("ledger.md", getattr(ledger, name))
        for name in ledger.__all__
        if inspect.isfunction(getattr(ledger, name))
    },
    "polite_stop": ("celery.md", celery.polite_stop),
    "register": ("metrics.md", prometheus.register),
    "gauges_view": ("metrics.md", prometheus.gauges_view),
    "instrument": ("metrics.md", otel.instrument),
    "uninstrument": ("metrics.md", otel.uninstrument),
}


def section(page: str, name: str) -> str:
    """Return what is below the heading of a name."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ `{re.escape(name)}`\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading `{name}`"
    return found[1]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    text = (REFERENCE / page).read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    return cells(text.split("\n#", 1)[0])


def cells(text: str) -> list[list[str]]:
    """Return the cells of a table without its head; code is without its marks."""
    table = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]
    return [[plain(cell) for cell in line] for line in found]


def plain(cell: str) -> str:
    whole = re.fullmatch(r"`([^`]*)`", cell)
    return (whole[1] if whole else cell).replace("\\|", "|")


def listed(page: str, heading: str) -> list[tuple[str, str, str]]:
    """Return names, types and defaults of a table, each of which has a meaning beside it."""
    table = rows(page, heading)
    assert all(meaning for *_, meaning in table), f"{page}, {heading}: a name without a meaning"
    return [(name, kind, default) for name, kind, default, _ in table]


def parameters(of: Callable[..., Any]) -> list[tuple[str, str, str]]:
    return [
        (
            each.name,
            type_of(each.annotation),
            "" if each.default is each.empty else value_of(each.default),
        )
        for each in inspect.signature(of).parameters.values()
        if each.name != "self"
    ]


def fields(of: Any) -> list[tuple[str, str, str]]:
    return [
        (
            each.name,
            type_of(each.type),
            "" if each.default is dataclasses.MISSING else value_of(each.default),
        )
        for each in dataclasses.fields(of)
    ]


def annotation(option: str) -> str:
    """Return the type that the class of the options says."""
    return next(
        str(base.__annotations__[option])
        for base in BatchProcessor.__mro__
        if option in vars(base).get("__annotations__", {})
    )


def test_every_option_is_listed_with_its_type_and_its_default() -> None:
    options = listed("processors.md", "Options")
    assert {name for name, *_ in options} == {"done", "failed", *Options.__annotations__}
    for name, kind, default in options:
        assert kind == annotation(name), name
        if name == "name":
            assert default == '"<app label>.<name>"'  # made from where the code is
        else:
            assert default == value_of(getattr(BatchProcessor, name)), name


def test_every_parameter_of_a_run_is_listed_with_its_type_and_its_default() -> None:
    table = listed("processors.md", "Parameters of a run")
    assert table == parameters(BatchProcessor.run)
    assert table == parameters(BatchProcessor.__call__)[1:]  # behind what refuses rows


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_callable_has_its_signature_on_its_page(name: str) -> None:
    page, of = CALLABLES[name]
    below = section(page, name.removeprefix("celery."))
    block = re.match(r"\n```text\n(.*?)\n```\n\n\w", below, re.DOTALL)
    assert block, f"{page}: `{name}` has no signature, or no word about it"
    assert block[1] == shown(name.rpartition(".")[2], of)


@pytest.mark.parametrize("name", ["batch_processor", "celery.run", "every"])
def test_every_parameter_has_a_meaning(name: str) -> None:
    page, of = CALLABLES[name]
    table = cells(section(page, name.removeprefix("celery.")))
    known = inspect.signature(of).parameters
    assert {parameter for parameter, _ in table} == {*known} - {"self", "misplaced"}
    assert all(meaning for _, meaning in table)


@pytest.mark.parametrize("name", VALUES)
def test_every_parameter_of_a_value_is_listed_with_its_type_and_its_default(name: str) -> None:
    assert listed("processors.md", f"`{name}`") == parameters(VALUES[name])


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_is_listed_with_its_type_and_its_default(name: str) -> None:
    page, of = DATACLASSES[name]
    heading = "Report" if name == "Report" else f"`{name}`"
    assert listed(page, heading) == fields(of)
    properties = {each for each, value in public(of).items() if isinstance(value, property)}
    for each in properties:
        getter = getattr(of, each).fget
        kind = type_of(inspect.signature(getter).return_annotation)
        assert f"```text\n{each}: {kind}\n```" in section(page, f"{name}.{each}")


def test_the_pages_have_no_name_that_the_code_has_not() -> None:
    known = {*CALLABLES, *DATACLASSES, *OTHERS, "run"}
    known |= {f"{kind}.{name}" for kind, (_, of) in DATACLASSES.items() for name in public(of)}
    assert set(dcl_processor.__all__) <= known
    pages = ("processors", "report", "testing", "celery", "metrics", "ledger")
    for page in (f"{name}.md" for name in pages):
        text = (REFERENCE / page).read_text(encoding="utf-8")
        assert set(re.findall(r"^#+ `(.+)`$", text, re.MULTILINE)) <= known, page


def test_every_delivery_is_listed() -> None:
    table = [(member, value) for member, value, _ in rows("processors.md", "`Delivery`")]
    assert table == [(value_of(each), repr(each.value)) for each in Delivery]


def test_every_column_of_the_abstract_models_is_listed() -> None:
    models: Iterable[type[Model]] = (columns.RetryColumns, columns.LeaseColumn)
    assert [tuple(line) for line in rows("processors.md", "Abstract models")] == [
        (model.__name__, field.name, declaration(field))
        for model in models
        for field in model._meta.local_fields
    ]


def declaration(field: Any) -> str:
    given = field.deconstruct()[3].items()
    return f"{type(field).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


def test_every_error_is_listed_with_its_bases_and_when_it_is_raised() -> None:
    errors = [
        each
        for each in vars(exceptions).values()
        if inspect.isclass(each) and issubclass(each, exceptions.ProcessorError)
    ]
    assert len(errors) >= 8
    assert rows("errors.md", "Errors") == [
        [
            each.__name__,
            ", ".join(
                base.__name__ for base in each.__bases__ if base is not exceptions.ProcessorError
            ),
            " ".join((each.__doc__ or "").replace("``", "`").split()),
        ]
        for each in errors
    ]


def test_every_signal_is_listed() -> None:
    known = [name for name, each in vars(signals).items() if isinstance(each, Signal)]
    assert [line[0] for line in rows("report.md", "Signals")] == known


def test_every_metric_is_listed_with_its_type_and_its_labels() -> None:
    of_runs = [(sample_name(each), each.type, labels(each)) for each in exposition.families({})]
    assert [tuple(line[:3]) for line in rows("metrics.md", "Metrics of runs")] == of_runs
    assert [tuple(line[:3]) for line in rows("metrics.md", "Metrics of the database")] == [
        (each.name, each.type, labels(each)) for each in gauges.gauges([])
    ]


def sample_name(metric: Any) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


def labels(metric: Any) -> str:
    return plain(", ".join(f"`{name}`" for name in metric._labelnames))


@pytest.mark.parametrize("action", ["run", *MODULES])
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
    assert taken - shown <= (set() if action == "run" else {"--traceback", "--verbosity"})


def test_every_check_of_the_doctor_is_on_its_page() -> None:
    source = "".join(
        module.read_text(encoding="utf-8") for module in Path(insights.__path__[0]).glob("*.py")
    )
    names = re.findall(
        r'(?:Level\.[A-Z_]+,|\bok\(|Finding\(level,|_unknown\()\s*"([a-z-]+)"', source
    )
    assert {line[0] for line in rows("command.md", "What it finds")} == {*names}


def test_every_check_has_a_line_on_its_page() -> None:
    source = "".join(
        module.read_text(encoding="utf-8") for module in Path(checks.__path__[0]).glob("*.py")
    )
    ids = re.findall(r'"(dcl_processor\.[EW]\d+)"', source)
    assert len(ids) == len(set(ids)) > 0
    assert [line[0] for line in rows("checks.md", "System checks")] == sorted(ids)


def _parser(action: str) -> argparse.ArgumentParser:
    parser = Command().create_parser("manage.py", "processors")
    subparsers: Any = next(
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    return subparsers.choices[action]  # type: ignore[no-any-return]
