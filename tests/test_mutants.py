"""The runner of mutants can fail: survivors and stale entries differ from the killed."""

from __future__ import annotations

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
NAMED = "tests/test_retry.py::test_the_error_is_cut_to_what_its_column_holds"


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
    "changes",
    [
        {"find": "a text that is nowhere"},
        {"put": "not (1 <= seconds"},
        {"tests": "tests/test_retry.py::test_that_is_gone"},
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
