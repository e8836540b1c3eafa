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
from types import ModuleType
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


def find(app_configs: Iterable[AppConfig] | None = None) -> list[Found]:
    """Return the processors of the apps (default: all installed), each once, in their order.

    An app without a ``processors.py`` has none. Errors from the import of one are not caught.
    """
    configs = apps.get_app_configs() if app_configs is None else app_configs
    found: dict[int, Found] = {}
    for each in (found for config in configs for found in _of(config)):
        # The same instance may have several names, and be imported into other apps' modules.
        found.setdefault(id(each.processor), each)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Broken:
    """An app whose ``processors.py`` cannot be imported, and why."""

    app: str
    error: BaseException

    def __str__(self) -> str:
        kind, what = type(self.error).__name__, shown(text(self.error))
        return (
            f"expected {self.app}.{MODULE} to be imported, got {kind}: {what} ({self._place()}); "
            "its processors are left out."
        )

    def _place(self) -> str:
        """Return the error's file and line, in the app's own module if the import got there."""
        if isinstance(self.error, SyntaxError) and self.error.filename:
            return f"{self.error.filename}, line {self.error.lineno}"
        frames = traceback.extract_tb(self.error.__traceback__)
        own = [each for each in frames if Path(each.filename).stem == MODULE]
        frame = (own or frames)[-1]
        return f"{frame.filename}, line {frame.lineno}"


@dataclass(frozen=True, slots=True)
class Unfinished(Broken):
    """A processor without its options, because its ``__init__`` did not call ``super()``'s."""

    def __str__(self) -> str:
        return f"{self.app}: {self.error}"


def broken() -> list[Broken]:
    """Return the apps, and the processors, that are left out because they cannot be used."""
    return survey(apps.get_app_configs())[1]


def survey(app_configs: Iterable[AppConfig]) -> tuple[list[Found], list[Broken]]:
    """Return the processors of the apps, and what is left out because it cannot be used."""
    found: dict[int, Found] = {}
    left_out: list[Broken] = []
    for config in app_configs:
        try:
            for each in find([config]):
                if hasattr(each.processor, "_identity"):
                    found.setdefault(id(each.processor), each)
                else:
                    left_out.append(_unfinished(each))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the other apps can run
            left_out.append(Broken(config.name, error))
    return list(found.values()), left_out


def _unfinished(found: Found) -> Unfinished:
    kind = type(found.processor).__name__
    return Unfinished(
        found.place,
        InvalidOption(
            f"expected {kind}.__init__() to call super().__init__(), which checks the options, got "
            "a processor without them; it is left out."
        ),
    )


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
    module = _module(config)
    for name, value in [] if module is None else list(vars(module).items()):
        if isinstance(value, BatchProcessor):
            yield Found(value, f"{config.name}.{MODULE}.{name}")


def _module(config: AppConfig) -> ModuleType | None:
    # Checked first, so that an ImportError inside the module is not taken for a missing module.
    if config.module is None or not module_has_submodule(config.module, MODULE):
        return None
    name = f"{config.name}.{MODULE}"
    token = importing.set(name)
    try:
        return import_module(name)
    finally:
        importing.reset(token)


def _unknown(name: str, known: list[str]) -> str:
    if not known:
        return (
            f"expected the name of a processor, got {name!r}, but no app has a processor; write "
            f"one in the {MODULE}.py of an app in INSTALLED_APPS."
        )
    # Users often leave the app label out.
    short = {each.rpartition(".")[2]: each for each in known}
    close = difflib.get_close_matches(name, [*known, *short], n=1)
    guess = f"; processors are those in the {MODULE}.py of an app in INSTALLED_APPS."
    if close:
        guess = f"; did you mean {short.get(close[0], close[0])}?"
    return f"expected the name of a processor, one of {', '.join(known)}, got {name!r}{guess}"
