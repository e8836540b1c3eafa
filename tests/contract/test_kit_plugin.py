"""The fixtures that a project's tests get with pytest, without an import."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from dcl_processor import testing
from tests.environments import CHECKOUT

TESTS = """
import pytest
from tests.contract.support.errands import errands, ignore, raising, transactional
from tests.models import Errand
from dcl_processor import Retry

@pytest.mark.django_db
def test_a_row(assert_settles, make_due):
    [row] = errands(1)
    fails = transactional(raising(ValueError("no")), retry=Retry())
    assert_settles(fails, row, outcome="failed")
    make_due(fails, row)
    assert_settles(transactional(ignore), row)
    assert Errand.objects.get().done

def test_the_race(race):
    assert callable(race)
"""


def test_the_package_names_the_plugin_and_its_fixtures_are_the_functions(tmp_path: Path) -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))
    [module] = settings["project"]["entry-points"]["pytest11"].values()
    assert {*testing.__all__} <= {*vars(import_module(module))}
    (tmp_path / "test_project.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = tests.settings\n")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", module, "-p", "pytest_django.plugin"]
    ran = subprocess.run(
        [*pytest, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONWARNINGS": "error",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, "2 passed" in ran.stdout) == (0, True), ran.stdout + ran.stderr
