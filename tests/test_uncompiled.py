"""Without compiled statements everything works as it does with them, only slower."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dcl_processor import batch_processor
from dcl_processor.compiled_sql.placeholders import Placeholder
from tests.contract.support import uncompiled
from tests.contract.support.reports import assert_run
from tests.environments import CHECKOUT, passed
from tests.models import Parcel

CONTRACT = "invariants batches leases at_most_once flips transaction_guard instances"

#: These count the statements of the claim that marks its rows at once, or expect it, or measure
#: memory for long.
NEED_ITS_SPEED = {
    "at_most_once": ["nothing_but_the_claim_is_sent_for_a_batch"],
    "leases": ["a_row_that_cannot_be_loaded_gets_reset"],
    "invariants": ["i8_memory_does_not_grow_with_the_backlog"],
}


def test_the_contract_is_kept_without_compiled_statements() -> None:
    files = [f"tests/contract/test_{name}.py" for name in CONTRACT.split()]
    others = [
        f"--deselect=tests/contract/test_{name}.py::test_{test}"
        for name, tests in NEED_ITS_SPEED.items()
        for test in tests
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.contract.support.uncompiled",
        *files,
    ]
    done = subprocess.run(
        [*command, *others, "-p", "no:cacheprovider"],
        cwd=CHECKOUT,
        # These tests run in the other stages, where CI leaves none of them out.
        env={**os.environ, "CI": "false"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed(done.stdout) >= 250


@pytest.mark.django_db(transaction=True)
def test_the_plugin_refuses_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    Parcel.objects.create()
    monkeypatch.setattr(Placeholder, "__init__", uncompiled.refuse)
    run = batch_processor(pending=Parcel.objects.filter(sent=False), done={"sent": True})(print)
    report = run()
    assert_run(report, failed=1)
    assert "expected nothing of compiled_sql/ to be in use" in str(report.failures)
