"""The functions as fixtures of pytest, which finds this module by the package's entry point."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def _fixture(name: str) -> Any:
    def given() -> Any:
        # Imported here: a project's settings may not be known before.
        return getattr(import_module("dcl_processor.testing"), name)

    given.__doc__ = f"Return ``dcl_processor.testing.{name}``."
    return pytest.fixture(name=name)(given)


assert_settles, make_due, race = map(_fixture, ("assert_settles", "make_due", "race"))
