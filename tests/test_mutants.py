"""The runner of mutants can fail: survivors, hangs and stale entries differ from the killed."""

from __future__ import annotations

from contextlib import nullcontext as _nowhere
from dataclasses import replace

import pytest

from tests.mutants import __main__ as runner
from tests.mutants.listed import Mutant, mutants

LASTS = Mutant(
    file="definition/lease.py",
    find="least=1,",
    put="least=0,",
    tests="tests/test_deliveries.py::test_a_lease_lasts_from_a_second_to_a_day",
    on="sqlite",
)
NAMED = "tests/test_deliveries.py::test_a_lease_names_its_column"


def test_the_list_is_long_and_tells_no_mutant_twice() -> None:
    listed = list(mutants())
    assert len([each for each in listed if not each.equivalent]) >= 150
    assert len({(each.file, each.find, each.put) for each in listed}) == len(listed)


def tried(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *listed: Mutant,
    options: tuple[str, ...] = (),
) -> tuple[int, str]:
    monkeypatch.setattr(runner, "mutants", lambda: iter(listed))
    code = runner.main(["--jobs=1", *options])
    return code, capsys.readouterr().out


def test_a_mutant_is_killed_by_a_test_that_fails_and_the_tree_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = LASTS.stale()
    code, said = tried(monkeypatch, capsys, LASTS)
    assert (code, before, LASTS.stale()) == (0, "", "")
    assert "1 mutants, 1 killed, 0 stale" in said


def test_a_survivor_fails_the_run_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = tried(monkeypatch, capsys, replace(LASTS, tests=NAMED))
    assert code == 1
    assert f"survived: {LASTS}" in said


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (
            "'tests/test_deliveries.py::test_that_is_not_there[in two words]'",
            "expected tests that are there",
        ),
        (
            "tests/test_retry.py --no-option-of-pytest",
            "expected tests that are there",
        ),
        ("tests/test_deliveries.py -k nothing_of_the_kind", "pass without it (exit code 5)"),
    ],
)
def test_tests_that_are_not_there_kill_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tests: str, why: str
) -> None:
    code, said = tried(monkeypatch, capsys, replace(LASTS, tests=tests))
    assert code == 1
    assert why in said


HANGS = replace(
    LASTS,
    find="        expect_seconds(\n",
    put="        while self.duration != 60: pass\n        expect_seconds(\n",
)


@pytest.mark.parametrize("may_hang", [False, True])
def test_tests_that_hang_kill_only_where_the_mutant_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], may_hang: bool
) -> None:
    hangs = replace(HANGS, hangs=may_hang)
    code, said = tried(monkeypatch, capsys, hangs, options=("--patience=10",))
    assert code == int(not may_hang)
    assert ("\nhung: " in said) is not may_hang


@pytest.mark.parametrize(
    "changes",
    [
        {"find": "a text that is nowhere"},
        {"find": "self"},
        {"put": LASTS.find},
        {"put": "not (1 <= seconds"},
        {"tests": ""},
        {"equivalent": "it has tests as well"},
        {"file": "gone.py"},
        {"tests": "tests/test_gone.py"},
        {"tests": "tests/test_retry.py::test_that_is_gone"},
        {"tests": "tests/test_retry.py[two words]"},
    ],
)
def test_a_stale_entry_fails_the_run_and_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, str]
) -> None:
    code, said = tried(monkeypatch, capsys, replace(LASTS, **changes))  # type: ignore[arg-type]  # words
    assert code == 1
    assert said.startswith("stale mutant, expected ")


def test_no_entry_of_the_list_is_stale() -> None:
    listed = list(mutants())
    assert len(listed) >= 300
    assert not [str(each) for each in listed if each.stale()]


def test_a_sample_is_the_same_for_the_same_commit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = list(mutants())
    drawn: list[Mutant] = []

    def judged(mutant: Mutant, **_: object) -> str:
        drawn.append(mutant)
        return ""

    monkeypatch.setattr(runner, "judged", judged)
    monkeypatch.setattr(runner, "copies", lambda number, kinds: _nowhere())
    for _ in range(2):
        _, said = tried(monkeypatch, capsys, *listed, options=("--sample=10", "--seed=abc"))
        assert "--seed abc" in said
    assert len(drawn) == 20
    assert drawn[:10] == drawn[10:]
