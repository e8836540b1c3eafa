"""Finds the processors: the instances that are module-level names in an app's ``processors.py``.

Defining a processor has no side effect; this module makes it known to the command and the checks.
"""

from __future__ import annotations

import difflib
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


def find(app_configs: Iterable[AppConfig] | None = None) -> list[Found]:
    """Return the processors of the apps (default: all installed), each once, in their order.

    An app without a ``processors.py`` has none. Errors from the import of one are not caught.
    """
    configs = apps.get_app_configs() if app_configs is None else app_configs
    return _each_once(found for config in configs for found in _of(config))


def survey(app_configs: Iterable[AppConfig]) -> tuple[list[Found], list[Broken]]:
    """Return the processors of the apps, and the apps whose module cannot be imported."""
    found: list[Found] = []
    left_out: list[Broken] = []
    for config in app_configs:
        try:
            found += find([config])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the other apps can run
            left_out.append(Broken(config.name, error))
    return _each_once(found), left_out


def broken() -> list[Broken]:
    """Return the apps whose ``processors.py`` cannot be imported."""
    return survey(apps.get_app_configs())[1]


def processors() -> dict[str, BatchProcessor[Any]]:
    """Return all processors by name; raise ``InvalidOption`` if two share a name.

    An app whose module cannot be imported has none: see ``broken()``.
    """
    by_name: dict[str, Found] = {}
    for each in survey(apps.get_app_configs())[0]:
        first = by_name.setdefault(each.processor.name, each)
        if first is not each:
            raise InvalidOption(shared_name(first, each))
    return {name: found.processor for name, found in by_name.items()}


def get(names: Iterable[str]) -> list[BatchProcessor[Any]]:
    """Return the processors of these names, each once; raise ``UnknownProcessor`` for others."""
    known = processors()
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            left_out = "".join(f" Also: {each}" for each in broken())
            raise UnknownProcessor(_unknown(name, list(known)) + left_out)
    return [known[name] for name in wanted]


def shared_name(first: Found, second: Found) -> str:
    """Return a message that two processors have one name, and how to fix it."""
    return (
        f"expected processors to have different names, got {first.processor.name!r} for both "
        f"{first.place} and {second.place}; set name= on one of them."
    )


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
        if isinstance(value, BatchProcessor):
            _refuse_unfinished(value)
            yield Found(value, f"{path}.{name}")


def _each_once(found: Iterable[Found]) -> list[Found]:
    first: dict[int, Found] = {}
    for each in found:
        # The same instance may have several names, and be imported into other apps' modules.
        first.setdefault(id(each.processor), each)
    return [*first.values()]


def _refuse_unfinished(processor: BatchProcessor[Any]) -> None:
    if not hasattr(processor, "_identity"):
        raise InvalidOption(
            f"expected {type(processor).__name__}.__init__() to call super().__init__(), which "
            "checks the options, got a processor without them."
        )


def _unknown(name: str, known: list[str]) -> str:
    # Users often leave the app label out.
    short = {each.rpartition(".")[2]: each for each in known}
    close = difflib.get_close_matches(name, [*known, *short], n=1)
    guess = f"processors are those in the {MODULE}.py of an app in INSTALLED_APPS."
    if close:
        guess = f"did you mean {short.get(close[0], close[0])}?"
    names = ", ".join(known) or "none"
    return f"expected the name of a processor, one of {names}, got {name!r}; {guess}"
