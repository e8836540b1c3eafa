"""Let the contract tests run on the new core: ``pytest -p tests.new_core tests/contract/…``.

The public names come from ``dcl_processor.core``. A module of the old core that a test imports is
the module of the new one that has taken its place, or a stand-in with whatever names are asked of
it. It goes when the new core takes the old one's place.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

import dcl_processor
from dcl_processor import core
from tests import settings

PACKAGE = "dcl_processor."
CORE = f"{PACKAGE}core."

#: Modules of the old core, and those of the new one that took their place.
PLACES = {
    "apps": "apps",
    "candidates.groups": "pending.groups",
    "candidates.question": "pending.question",
    "candidates.scan": "pending.scan",
    "clock": "pending.clock",
    "columns": "options.columns",
    "database.contention": "sql.errors",
    "decorator": "decorator",
    "definition.definition": "options.options",
    "definition.kinds": "options.kinds",
    "definition.retry": "options.retry",
    "engine.heartbeat": "engine.heartbeat",
    "engine.run": "engine.run",
    "engine.session": "sql.messages",
    "engine.source": "engine.source",
    "errors": "report.errors",
    "exceptions": "report.exceptions",
    "execution.calls": "engine.calls",
    "execution.handler": "engine.calls",
    "interrupts": "report.interrupts",
    "locking.isolation": "sql.isolation",
    "locking.slots": "engine.slots",
    "masking": "report.errors",
    "outcomes": "report.outcomes",
    "processor": "processor",
    "report": "report.report",
    "runner.counters": "report.counters",
    "runner.in_flight": "engine.poison",
    "runner.limits": "engine.limits",
    "signals": "report.events",
    "steady": "pending.steady",
    "values": "report.values",
    "worker": "options.worker",
}


class StandIn(ModuleType):
    """A module, class or function that the new core does not have."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full.removeprefix(PACKAGE) in PLACES:
            return importlib.import_module(full)
        # A class, so that it can be a base, an annotation or an argument of isinstance().
        made = Nameless(name, (), {})
        setattr(self, name, made)
        return made


class Nameless(type):
    """A stand-in inside a module, also for a module."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Nameless(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return Nameless("call", (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the old core."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PACKAGE) or f"{fullname}.".startswith(CORE):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        place = PLACES.get(spec.name.removeprefix(PACKAGE))
        if place is None:
            return StandIn(spec.name)
        module = importlib.import_module(CORE + place)
        self._own = module.__spec__
        # What the new core does not have is a stand-in, so that the other tests of a file run.
        vars(module).setdefault("__getattr__", lambda name: Nameless(name, (), {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        if not isinstance(module, StandIn):
            module.__spec__ = self._own  # which importlib has replaced


def lenient(self: pytest.MonkeyPatch, *given: Any, raising: bool = False) -> None:
    """Set an attribute of the new core that only the old one looks at."""
    setattr_(self, *given, raising=raising)


setattr_: Any = pytest.MonkeyPatch.setattr
pytest.MonkeyPatch.setattr = lenient  # type: ignore[method-assign, assignment]
loaded = [name for name in sys.modules if name.startswith(PACKAGE) and CORE[:-1] not in name]
assert not loaded, f"load this plugin first, with -p: {loaded}"
sys.meta_path.insert(0, Finder())
dcl_processor._MODULES.update({name: f".core{place}" for name, place in core._MODULES.items()})


# The apps of the edge are on the old core, and so is the shop's admin.
settings.INSTALLED_APPS = [each for each in settings.INSTALLED_APPS if not each.startswith(PACKAGE)]
settings.INSTALLED_APPS[0] = "django.contrib.admin.apps.SimpleAdminConfig"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that wait for the new core like all others."""
    for item in items:
        if item.get_closest_marker("waits_for_core") is not None:
            item.own_markers = [each for each in item.own_markers if each.name != "xfail"]
