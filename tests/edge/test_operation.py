"""What an operator sees when something else than a row goes wrong, on the real command."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from dcl_processor import batch_processor
from tests.contract.support.reports import assert_run
from tests.edge.manage import Install, Manage, besides_lifecycle, processors, started
from tests.edge.watchers import parcels, unsent
from tests.gates import at_gate
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"


# --- a run that an error ends

GONE = "the database reported: "


@pytest.mark.parametrize("way", [[], ["--json"]], ids=" ".join)
def test_a_run_that_an_error_ends_says_what_it_did_until_then(way: list[str]) -> None:
    parcels("", "", "server gone", "", "")
    done = processors("run", DELIVER, *way)
    assert done.returncode == 1
    if way:
        found = json.loads(done.stdout)
        assert (found["name"], found["ok"], found["processed"]) == (DELIVER, False, 3)
        assert found["error"].startswith(GONE)
    else:
        words = rf"{DELIVER}: 3 processed in .* s; stopped by failures\n"
        assert re.fullmatch(words, done.stdout)
    why, summary = done.stderr.splitlines()
    assert why.startswith(f"{DELIVER}: {GONE}")
    assert summary == f"CommandError: {DELIVER} did not run to the end."
    assert len(unsent()) == 2


def test_the_error_has_the_report_in_the_code_as_well() -> None:
    parcels("", "interrupt")

    def handle(row: Parcel) -> None:
        if row.note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        batch_processor(pending=Parcel.objects.filter(sent=False), done={"sent": True})(handle)()
    report = raised.value.report  # type: ignore[attr-defined]
    assert_run(report, processed=1, stopped="signal")
    assert raised.value.__notes__ == [f"Until then: {report}"]


# --- a run that cannot be made, in JSON


def test_a_run_that_cannot_be_made_is_a_json_object() -> None:
    done = processors("run", DELIVER, "--json", DATABASE_URL="postgres://nobody@127.0.0.1:1/no")
    document = json.loads(done.stdout)
    assert (document["name"], document["ok"]) == (DELIVER, False)
    assert document["error"].startswith("the database reported: ")


# --- a processors.py that cannot be imported


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import post.processors.more", "ModuleNotFoundError: No module named 'post.processors.mo"),
        ("raise SystemExit('no')", "SystemExit: no ("),
        ("if:", "SyntaxError: invalid syntax"),
        ("batch_processor(pending=Parcel.objects.all(), doen={})(print)", "has no option 'doen'"),
    ],
)
def test_one_broken_module_takes_out_its_own_app_alone(
    manage: Manage, install: Install, line: str, words: str
) -> None:
    parcels("")
    install("post", line)
    done = manage("run", "--all")
    assert done.code == 3
    assert len(unsent()) == 0
    said, summary = done.err.splitlines()
    assert said.startswith("expected post.processors to be imported, got ")
    assert words in said
    assert "processors.py, line 3)" in said
    assert said.endswith("; its processors are left out.")
    assert summary == "CommandError: the processors of post cannot be imported."
    assert manage("run", DELIVER).code == 0
    listed = manage("list")
    assert (listed.code, DELIVER in listed.out) == (3, True)
    assert "post.processors" in listed.err
    wrong = manage("run", "post.send")
    assert (wrong.code, "line 3" in wrong.err) == (2, True)


# --- signals


@pytest.mark.parametrize(
    ("signum", "workers"), [(signal.SIGHUP, "1"), (signal.SIGQUIT, "2"), (signal.SIGINT, "2")]
)
def test_a_closed_terminal_or_ctrl_c_ends_a_run_as_sigterm_does(
    gate: Path, interrupts: None, signum: signal.Signals, workers: str
) -> None:
    """The whole process group gets it."""
    parcels("gate", "gate", "")
    with started("run", DELIVER, "--workers", workers, GATE=str(gate)) as process:
        at_gate(gate, handlers=int(workers))
        os.killpg(process.pid, signum)
        at_gate(gate, "stopping", int(workers))
        (gate / "open").touch()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, besides_lifecycle(err)) == (0, "")
    assert "stopped by signal" in out
    # Of the last row a worker may have made something before it came to the gate.
    processed = sum(map(int, re.findall(r"(\d+) processed", out)))
    assert processed in {int(workers), int(workers) + 1}
    assert len(unsent()) == 3 - processed


# --- failures, once, and with what follows


def test_a_row_that_is_tried_again_is_no_failure_of_the_command_yet(manage: Manage) -> None:
    row = Errand.objects.create(result="no answer")
    first = manage("run", "warehouse.try_twice")
    assert first.code == 0
    assert first.err == (
        f"warehouse.try_twice: row {row.pk} failed (attempt 1 of 2, again in 0 s): "
        "OSError: no answer\n"
    )
    assert first.out.startswith("warehouse.try_twice: 1 failed in ")
    second = manage("run", "warehouse.try_twice")
    assert second.code == 1
    assert second.err.splitlines() == [
        f"warehouse.try_twice: row {row.pk} failed (attempt 2 of 2, given up): OSError: no answer",
        "CommandError: 1 row failed.",
    ]


FORGED = "no\nsend: row 1 failed\x1b[2J\x1b]0;title\x07\u202e\u2028end"


def test_what_strangers_wrote_forges_no_line_and_commands_no_terminal(manage: Manage) -> None:
    Errand.objects.create(result=FORGED)
    done = manage("run", "warehouse.try_twice")
    assert "no send: row 1 failed\\x1b[2J\\x1b]0;title\\x07\\u202e end" in done.err
    assert not set("\x1b\x07\u202e\u2028") & set(done.err)
    assert len(done.err.splitlines()) == 1
