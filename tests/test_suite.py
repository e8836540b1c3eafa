"""The suite's own promises: nothing is left out in silence, and nothing at all in CI."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from django.db import connection

from tests import quick, suite
from tests.contract import conftest as contract
from tests.environments import CHECKOUT, ENVIRONMENTS, Environment
from tests.progress import side_by_side
from tests.suite import LeftOutError, StageFailedError, everything, stages


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


def said_by(**codes: str) -> dict[str, tuple[str, str, str]]:
    return {name: (sys.executable, "-c", code) for name, code in codes.items()}


def test_stages_side_by_side_fail_and_are_left_out_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = said_by(
        earth="print('= 7 passed in 3 s =')",
        sun="print('FAILED tests/hot.py'); raise SystemExit(1)",
        moon="print('\\nLeft out: moon')",
    )
    assert side_by_side(commands, most=2) == 1
    out = capsys.readouterr().out
    assert "  earth  7 passed in 3 s\n" in out
    assert "  moon   left out\n" in out
    assert re.search("  sun    FAILED\\s*\\n", out)
    assert "  sun    FAILED tests/hot.py\n" in out
    assert out.endswith("\n=== output of sun\nFAILED tests/hot.py\n\n\n=== failed: sun\n")
    del commands["sun"]
    assert side_by_side(commands, most=2) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "=== all is well, without moon"


def test_how_far_a_stage_is_can_be_read_while_it_runs(tmp_path: Path) -> None:
    """Through a pipe, and each line before the stage goes on."""
    go_on = tmp_path / "go on"
    stage = f"""
import pathlib, time
print('tests/a.py ... [  9%]'); print('tests/b.py ... [ 13%]'); print('tests/c.py . [ 19%]')
while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)
print('tests/d.py .. [100%]')
"""
    code = (
        f"from tests.progress import side_by_side; side_by_side({said_by(earth=stage)!r}, most=1)"
    )
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        go_on.touch()
        lines += process.stdout.read().splitlines()
    said = [line.strip().partition("  ")[2] for line in lines]
    assert said == ["earth  started", "earth  13 %", "earth  passed", "", ""]


def test_an_unknown_stage_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suite.main(["mars"]) == 2
    assert capsys.readouterr().out == "Expected stages out of moon, sun, earth; got mars.\n"


# --- what is run, written down a second time: nothing else would miss a stage that is gone

CONTRACT = "tests/contract tests/crash tests/fuzz tests/ledger"
ON_MARIADB = f"tests.servers.mariadb -- {sys.executable} -m pytest"
SHARED = "--share=6"
RUN = {
    "lint": ["ruff check .", "ruff format --check .", "mypy", "pyright"],
    "docs": ["sphinx -W --keep-going --quiet docs docs/_build/html"],
    "postgresql": ["pytest NO_STAGE_OF_ITS_OWN --turn=0/4 HERE --expect-database=postgresql"],
    "programs": [f"pytest {' '.join(suite.PROGRAMS)} --expect-database=postgresql"],
    "pages": [f"pytest {' '.join(suite.PAGES)} --expect-database=postgresql"],
    "schedules": [f"pytest {' '.join(suite.SCHEDULES)} --expect-database=postgresql"],
    "commands": [
        f"pytest {' '.join(suite.COMMANDS)} --share=3 --expect-database=postgresql",
    ],
    "mariadb": [f"{ON_MARIADB} {CONTRACT} tests/test_servers.py --expect-database=mysql {SHARED}"],
    "sqlite": [f"pytest {CONTRACT} --expect-database=sqlite {SHARED}"],
    "psycopg2": [f"pytest {' '.join(suite.ABOUT_THE_DRIVER)} --expect-database=postgresql"],
    "mutants": ["tests.mutants --sample=10 --jobs=1"],
    "django5.2": [
        f"pytest OTHER --turn=1/4 THERE {SHARED} --expect-database=postgresql --expect-django=5.2",
    ],
    "django6.0": [
        f"pytest OTHER --turn=2/4 THERE {SHARED} --expect-database=postgresql --expect-django=6.0",
    ],
    "django6.1": [
        f"pytest OTHER --turn=3/4 THERE {SHARED} --expect-database=postgresql --expect-django=6.1",
    ],
    "speed": ["pytest tests/speed --expect-database=postgresql"],
}


def test_each_stage_runs_all_that_it_is_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    urls: list[str | None] = []

    def call(module: str, *arguments: str, python: str = "", **variables: str) -> int:
        words = [module, *arguments]
        said.append(" ".join(each for each in words if not each.startswith("--expect-passed=")))
        urls.append(variables.get("DATABASE_URL"))
        return 0

    monkeypatch.setattr(suite, "call", call)
    monkeypatch.setattr(suite, "version", lambda name: "0.0")
    for name in ("mariadb_is_installed", "has_driver"):
        monkeypatch.setattr(suite, name, lambda: True)
    for name in ("find_python", "make"):
        monkeypatch.setattr(Environment, name, lambda *_: "python")
    monkeypatch.setattr(suite, "apt_install", lambda *_: None)
    own = (*suite.SCHEDULES, *suite.PROGRAMS, *suite.PAGES, *suite.COMMANDS)
    always = (*suite.ABOUT_DJANGO, *suite.ABOUT_THE_REST)
    names = {
        " ".join(suite.without(own)): "NO_STAGE_OF_ITS_OWN",
        " ".join(suite.without(suite.ABOUT_THE_REST)): "OTHER",
        " ".join(f"--always={each}" for each in always): "HERE",
        " ".join(f"--always={each}" for each in suite.ABOUT_DJANGO): "THERE",
    }
    ran: dict[str, list[str]] = {}
    for name, (_, stage) in stages().items():
        stage()
        for options, each in names.items():
            said[:] = [command.replace(options, each) for command in said]
        ran[name] = [*said]
        said.clear()
    assert ran == RUN
    assert [url and url.partition(":")[0] for url in urls if url] == ["sqlite"] * 3


def test_this_django_is_tested_and_so_are_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is that of the full suite."""
    assert [each.django for each in ENVIRONMENTS] == ["5.2", "6.0", "6.1"]
    for own in ENVIRONMENTS:
        monkeypatch.setattr(suite, "version", lambda name, own=own: f"{own.django}.1")
        assert set(RUN) - set(stages()) == {own.name}


def test_the_quick_part_leaves_out_only_what_is_named() -> None:
    contract = {each.name for each in (CHECKOUT / "tests" / "contract").glob("test_*.py")}
    run = {Path(each).name for each in quick.fast_files() if each.startswith("tests/contract/")}
    assert contract - run == quick.SLOW


def test_a_file_that_is_left_out_of_its_folder_may_be_named_all_the_same() -> None:
    """``make quick`` names its files, and then conftest.py leaves none of them out."""
    named = {Path(each).name for each in quick.fast_files()}
    for file in named.intersection(contract.collect_ignore):
        module = importlib.import_module(f"tests.contract.{Path(file).stem}")
        skips = [mark.args for mark in module.pytestmark if mark.name == "skipif"]
        assert (True,) in skips, f"{file} runs on {connection.vendor} when it is named"


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_name_all_stages_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    started: list[str] = []

    def ends(commands: Mapping[str, Sequence[str]], most: int) -> int:
        assert [command[-1] for command in commands.values()] == [*commands]
        started.extend(commands)
        return int(fails)

    monkeypatch.setattr(suite, "install_servers", lambda: None)
    monkeypatch.setattr(suite, "ALONE", ("earth",))
    monkeypatch.setattr(suite, "side_by_side", ends)
    assert everything() == int(fails)
    assert sorted(started) == ["moon", "sun"]
    assert ("\n=== earth: " in capsys.readouterr().out) is not fails  # alone, after the others


def test_ci_runs_all_stages_and_leaves_nothing_out() -> None:
    ci = (CHECKOUT / ".ci" / "run").read_text()
    assert ci.splitlines()[-1] == "CI=true exec make test"
    make = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test"],  # noqa: S607  # where every machine has it
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert make.stdout.splitlines()[-1].endswith("-m tests.suite")
