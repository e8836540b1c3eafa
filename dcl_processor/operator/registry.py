"""Finds the processors: the instances that are module-level names in an app's ``processors.py``.

Defining a processor has no side effect; this module makes it known to the command and the checks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from django.apps import AppConfig, apps
from django.utils.module_loading import module_has_submodule

from dcl_processor.exceptions import InvalidOption, UnknownProcessor
from dcl_processor.processor import BatchProcessor, importing
from dcl_processor.report.errors import shown, text

MODULE = "processors"


@dataclass(frozen=True, slots=True)
class Found:
    """A processor, and where it was found: "module.name"."""

    processor: BatchProcessor[Any]
    place: str


@dataclass(frozen=True, slots=True)
class Broken:
    """An app whose ``processors.py`` cannot be imported, and why."""

    app: str
    error: BaseException

    def __str__(self) -> str:
        kind, what = type(self.error).__name__, shown(text(self.error))
        frames = traceback.extract_tb(self.error.__traceback__)
        own = [each for each in frames if Path(each.filename).stem == MODULE]
        frame = (own or frames)[-1]
        return (
            f"expected {self.app}.{MODULE} to be imported, got {kind}: {what} ({frame.filename}, "
            f"line {frame.lineno}); its processors are left out."
        )


def survey(app_configs: Iterable[AppConfig]) -> tuple[list[Found], list[Broken]]:
    """Return the processors of the apps, each once, and the apps that cannot be imported.

    An app without a ``processors.py`` has none.
    """
    first: dict[int, Found] = {}
    left_out: list[Broken] = []
    for config in app_configs:
        try:
            # The same instance may have several names, and be imported into other apps' modules.
            for each in [*_of(config)]:
                first.setdefault(id(each.processor), each)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the other apps can run
            left_out.append(Broken(config.name, error))
    return [*first.values()], left_out


def broken() -> list[Broken]:
    """Return the apps whose ``processors.py`` cannot be imported."""
    return survey(apps.get_app_configs())[1]


def processors() -> dict[str, BatchProcessor[Any]]:
    """Return all processors by name; raise ``InvalidOption`` if two share a name.

    An app whose module cannot be imported has none: see ``broken()``.
    """
    by_name: dict[str, Found] = {}
    for each in survey(apps.get_app_configs())[0]:
        name = each.processor.name
        first = by_name.setdefault(name, each)
        if first is not each:
            raise InvalidOption(
                f"expected processors to have different names, got {name!r} for both "
                f"{first.place} and {each.place}; set name= on one of them."
            )
    return {name: found.processor for name, found in by_name.items()}


def get(names: Iterable[str]) -> list[BatchProcessor[Any]]:
    """Return the processors of these names, each once; raise ``UnknownProcessor`` for others."""
    known, wanted = processors(), dict.fromkeys(names)
    for name in wanted:
        if name not in known:
            raise UnknownProcessor(
                f"expected the name of a processor, one of {', '.join(known) or 'none'}, got "
                f"{name!r}; processors are those in the {MODULE}.py of an app in INSTALLED_APPS."
                + "".join(f" Also: {each}" for each in broken())
            )
    return [known[name] for name in wanted]


def _of(config: AppConfig) -> Iterator[Found]:
    # Checked first, so that an ImportError inside the module is not taken for a missing module.
    if config.module is None or not module_has_submodule(config.module, MODULE):
        return
    path = f"{config.name}.{MODULE}"
    token = importing.set(path)
    try:
        module = import_module(path)
    finally:
        importing.reset(token)
    for name, value in list(vars(module).items()):
        if not isinstance(value, BatchProcessor):
            continue
        if not hasattr(value, "_identity"):
            raise InvalidOption(
                f"expected {type(value).__name__}.__init__() to call super().__init__(), which "
                "checks the options, got a processor without them."
            )
        yield Found(value, f"{path}.{name}")
