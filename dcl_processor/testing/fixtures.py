"""The test kit as pytest's fixtures, for projects that use pytest-django.

Name this module in the root ``conftest.py``, because installing it does not load it:
``pytest_plugins = ["dcl_processor.testing.fixtures"]``. ``race`` and ``hold_lock`` use a database
whose rows are committed, as ``django_db(transaction=True)`` does; the others use either kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from dcl_processor import testing
from dcl_processor.report import Report

from .racing import Race


@pytest.fixture
def race(transactional_db: None) -> Callable[..., Race]:  # noqa: ARG001  # asked for by name
    """Return ``dcl_processor.testing.race``."""
    return testing.race


@pytest.fixture
def hold_lock(
    transactional_db: None,  # noqa: ARG001  # asked for by name
) -> Callable[..., AbstractContextManager[None]]:
    """Return ``dcl_processor.testing.hold_lock``."""
    return testing.hold_lock


@pytest.fixture
def assert_settles(db: None) -> Callable[..., Report]:  # noqa: ARG001  # asked for by name
    """Return ``dcl_processor.testing.assert_settles``."""
    return testing.assert_settles


@pytest.fixture
def assert_processed_once(
    db: None,  # noqa: ARG001  # asked for by name
) -> type[testing.assert_processed_once]:
    """Return ``dcl_processor.testing.assert_processed_once``."""
    return testing.assert_processed_once
