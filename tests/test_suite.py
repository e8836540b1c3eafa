"""The suite's own promises: nothing is left out in silence, and nothing at all in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import suite
from tests.environments import CHECKOUT
from tests.suite import LeftOutError, StageFailedError


def leave_out() -> None:
    raise LeftOutError("this machine has no moon")


def fail() -> None:
    raise StageFailedError


def succeed() -> None:
    """Do nothing, successfully."""


@pytest.fixture(autouse=True)
def _stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    stages = {"moon": ("on the moon", leave_out), "sun": ("", fail), "earth": ("", succeed)}
    monkeypatch.setattr(suite, "stages", lambda: stages)


def test_what_is_left_out_is_said_in_one_line_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite.main(["moon", "earth"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Left out: moon, because this machine has no moon." in lines
    assert lines[-1] == "=== all is well, without moon"


def test_in_ci_leaving_out_is_failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    assert suite.main(["moon", "earth"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "=== failed: moon (left out)"


def test_a_stage_that_fails_does_not_hide_what_comes_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "=== earth: " in lines
    assert lines[-1] == "=== failed: sun"


def test_stages_side_by_side_fail_and_are_left_out_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = {"earth": "pass", "sun": "raise SystemExit(1)", "moon": "print('\\nLeft out: moon')"}
    commands = {name: (sys.executable, "-c", code) for name, code in said.items()}
    assert suite.side_by_side(commands, most=2) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "=== failed: sun"
    del commands["sun"]
    assert suite.side_by_side(commands, most=2) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "=== all is well, without moon"


def test_an_unknown_stage_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite.main(["mars"]) == 2
    assert capsys.readouterr().out == "Expected stages out of moon, sun, earth; got mars.\n"


@pytest.mark.parametrize(
    "skip",
    [
        "def test(): pytest.skip('reason')",
        "@pytest.mark.skip(reason='reason')\ndef test(): pass",
        "pytest.skip('reason', allow_module_level=True)",
    ],
)
def test_in_ci_skipping_is_failing(tmp_path: Path, skip: str) -> None:
    (tmp_path / "test_skips.py").write_text(f"import pytest\n{skip}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    for ci, passes in (("false", True), ("true", False)):
        finished = subprocess.run(
            command,
            cwd=CHECKOUT,
            env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        # 5: nothing was collected, because the whole module was skipped.
        assert (finished.returncode in {0, 5}) is passes, finished.stdout
        assert ("every test must run" in finished.stdout) is not passes
