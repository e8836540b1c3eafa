"""The functions as fixtures of pytest, which finds this module by the package's entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcl_processor import testing


def _fixture(function: Callable[..., Any]) -> Any:
    def given() -> Callable[..., Any]:
        return function

    given.__doc__ = f"Return ``dcl_processor.testing.{function.__name__}``."
    return pytest.fixture(name=function.__name__)(given)


assert_settles = _fixture(testing.assert_settles)
make_due = _fixture(testing.make_due)
race = _fixture(testing.race)
