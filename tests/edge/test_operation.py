"""What an operator sees when something else than a row goes wrong, on the real command."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcl_processor import batch_processor
from dcl_processor.engine import limits
from dcl_processor.engine.calls import Call
from dcl_processor.exceptions import InvalidOption
from dcl_processor.management.watching import ErrorDedup, _Log
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.news import AtWork, Died
from tests.contract.support.reports import assert_run
from tests.edge.manage import (
    CHECKOUT,
    Install,
    Manage,
    at_gate,
    besides_lifecycle,
    output,
    processors,
    started,
)
from tests.edge.watchers import SELDOM, parcels, unsent, watching
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

DELIVER = "warehouse.deliver"


# --- a run that an error ends

READ_ONLY = "expected the database 'default' to accept writes"


def test_a_run_that_an_error_ends_says_what_it_did_until_then() -> None:
    parcels("", "", "read only", "", "")
    done = processors("run", DELIVER)
    assert done.returncode == 1
    assert re.fullmatch(rf"{DELIVER}: 3 processed in .* s; stopped by failures\n", done.stdout)
    why, summary = done.stderr.splitlines()
    assert why.startswith(f"{DELIVER}: {READ_ONLY}")
    assert summary == f"CommandError: {DELIVER} did not run to the end."
    assert len(unsent()) == 2


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=" ".join)
def test_in_json_it_is_one_object_of_each_worker_with_both(workers: list[str]) -> None:
    parcels("", *["read only"] * 3, "", "")
    done = processors("run", DELIVER, "--json", *workers)
    assert done.returncode == 1
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(each["name"], each["ok"]) for each in documents} == {(DELIVER, False)}
    assert sum(each.get("processed", 0) for each in documents) == 6 - len(unsent()) > 0
    assert all(each["error"].startswith(READ_ONLY) for each in documents)
    numbers = [each.get("worker") for each in documents]
    assert numbers == ([1, 2] if workers else [None])


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


def test_what_is_in_doubt_is_named_when_a_run_is_stopped_at_once(gate: Path) -> None:
    Errand.objects.create()
    with started("run", "warehouse.fetch", GATE=str(gate)) as process:
        at_gate(gate)
        process.terminate()
        at_gate(gate, "stopping")
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == (
        "CommandError: stopped at once by SIGTERM; uncommitted work is rolled back; "
        "warehouse.fetch: rows that were claimed and not settled stay claimed, in doubt."
    )
    assert Errand.objects.filter(claimed=True, done=False).count() == 1


# --- output that cannot be written

LOST = "stdout cannot be written to, but the command continues: "


@pytest.mark.parametrize("way", [[], ["--json"], ["--workers", "2"]], ids=" ".join)
def test_a_full_disk_ends_no_run(way: list[str]) -> None:
    parcels("", "", "")
    with Path("/dev/full").open("w") as full:
        done = processors("run", DELIVER, "warehouse.weigh", *way, stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{LOST}OSError: [Errno 28] No space left on device",
        "CommandError: output could not be written.",
    ]
    assert len(unsent()) == 0
    assert not Parcel.objects.filter(weight=None).exists()


# --- a run that cannot be made, in JSON


@pytest.mark.parametrize("more", [[], ["--watch", "0.2"]], ids=" ".join)
def test_a_run_that_cannot_be_made_is_a_json_object(more: list[str]) -> None:
    nowhere = "postgres://nobody@127.0.0.1:1/nowhere"
    with watching(DELIVER, "--json", *more, DATABASE_URL=nowhere) as watcher:
        said = watcher.says("{")
        _, rest, _ = watcher.end(signal.SIGTERM if more else None)
    for document in map(json.loads, [said, *rest.splitlines()]):
        assert (document["name"], document["ok"]) == (DELIVER, False)
        assert document["error"].startswith("expected the database 'default' to answer, got: ")


# --- a processors.py that cannot be imported


def test_one_broken_module_takes_out_its_own_app_alone(manage: Manage, install: Install) -> None:
    parcels("")
    install("post", "1 / 0")
    done = manage("run", "--all")
    assert done.code == 1
    assert len(unsent()) == 0
    said, summary = done.err.splitlines()
    assert said.startswith("expected post.processors to be imported, got ZeroDivisionError: ")
    assert said.endswith("/post/processors.py, line 3); its processors are left out.")
    assert summary == "CommandError: post did not run to the end."
    assert manage("run", DELIVER).code == 0
    listed = manage("list")
    assert (listed.code, DELIVER in listed.out) == (3, True)
    assert "post.processors" in listed.err
    wrong = manage("run", "post.send")
    assert (wrong.code, "line 3" in wrong.err) == (1, True)


# --- signals


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
@pytest.mark.parametrize("workers", ["1", "2"])
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


#: The settings of workers that do not come to their end while they load.
LOADING = """
import os, pathlib, time
from tests.warehouse.settings import *
if "DCL_PROCESSOR_WORKER" in os.environ:
    (pathlib.Path(os.environ["GATE"]) / f"reached-{os.getpid()}").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("watch", [[], ["--watch", "1"]], ids=" ".join)
def test_two_signals_while_copies_start_end_it_at_once_and_in_one_line(
    tmp_path: Path, gate: Path, watch: list[str]
) -> None:
    """It waits for none that is loading."""
    parcels(*[""] * 50)
    (tmp_path / "loading.py").write_text(LOADING)
    arguments = ("run", DELIVER, "--workers", "4", *watch)
    variables = {
        "DJANGO_SETTINGS_MODULE": "loading",
        "PYTHONPATH": f"{CHECKOUT}:{tmp_path}",
        "GATE": str(gate),
        "EXIT_WITHIN": SELDOM,
    }
    with started(*arguments, **variables) as process:
        workers = at_gate(gate, handlers=4)
        # Two that come before it looks are one to it, if they are equal.
        process.send_signal(signal.SIGHUP)
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert besides_lifecycle(err).splitlines() == [
        "CommandError: stopped at once by SIGTERM; uncommitted work is rolled back."
    ]
    assert not any(map(psutil.pid_exists, workers))
    assert len(unsent()) == 50


# --- failures, once, and with what follows


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"dcl_processor": {"handlers": ["console"], "level": "INFO"}},
}


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=" ".join)
def test_what_is_logged_to_stderr_is_not_repeated_there(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "logging_settings.py").write_text(
        f"from tests.warehouse.settings import *\nLOGGING = {LOGGING!r}\n"
    )
    broken, *_ = parcels("broken", "", "", "")
    done = processors(
        *("run", DELIVER, *workers),
        DJANGO_SETTINGS_MODULE="logging_settings",
        PYTHONPATH=f"{CHECKOUT}:{tmp_path}",
    )
    assert done.returncode == 1
    # Of each worker that has tried it.
    assert 1 <= done.stderr.count(f"row {broken} failed: ") == done.stderr.count("Traceback") <= 2
    assert re.search(r"CommandError: (1 row|2 rows) failed\.\n$", done.stderr)


def test_a_row_that_is_tried_again_is_no_failure_of_the_command_yet() -> None:
    row = Errand.objects.create(result="no answer")
    first = processors("run", "warehouse.try_twice")
    assert (first.returncode, first.stderr) == (0, "")
    failed, report = first.stdout.splitlines()
    assert failed == (
        f"warehouse.try_twice: row {row.pk} failed (attempt 1 of 2, again in 0 s): "
        "OSError: no answer"
    )
    assert report.startswith("warehouse.try_twice: 1 failed in ")
    second = processors("run", "warehouse.try_twice")
    assert second.returncode == 1
    assert second.stderr.splitlines() == [
        f"warehouse.try_twice: row {row.pk} failed (attempt 2 of 2, given up): OSError: no answer",
        "CommandError: 1 row failed.",
    ]


FORGED = "no\nsend: row 1 failed\x1b[2J\x1b]0;title\x07\u202e\u2028end"


@pytest.mark.parametrize("more", [[], ["-v", "2"]], ids=" ".join)
def test_what_strangers_wrote_forges_no_line_and_commands_no_terminal(more: list[str]) -> None:
    Errand.objects.create(result=FORGED)
    processors("run", "warehouse.try_twice")
    done = processors("run", "warehouse.try_twice", *more)
    assert "no send: row 1 failed\\x1b[2J\\x1b]0;title\\x07\\u202e end" in done.stderr
    assert not set("\x1b\x07\u202e\u2028") & set(done.stderr)
    if not more:
        assert len(done.stderr.splitlines()) == 2


# --- ceilings


@pytest.mark.parametrize(
    "parameters",
    [{"concurrency": 100_000}, {"concurrency": limits.MOST_THREADS + 1}, {"wait_for_locked": 1e12}],
    ids=str,
)
def test_numbers_beyond_reason_are_refused(parameters: dict[str, Any]) -> None:
    processor = batch_processor(pending=Parcel.objects.filter(sent=False), done={"sent": True})
    with pytest.raises(InvalidOption, match=r"expected (concurrency|wait_for_locked) to be"):
        processor(lambda row: None)(**parameters)


# --- an outage is reported when it begins, when its cause changes, and when it is over


def test_an_outage_is_reported_once_and_its_other_causes_too() -> None:
    outages = ErrorDedup({})
    said = [outages.say("a", each) for each in ("refused", "refused", "starting", "starting")]
    assert said == [True, False, True, False]
    assert outages.end("a") is not None
    assert outages.end("a") is None
    assert outages.say("a", "refused")


def test_several_with_one_server_tell_of_it_once_and_the_last_that_it_is_over() -> None:
    outages = ErrorDedup({})
    assert outages.say("a", "refused")
    assert not outages.say("b", "refused")
    assert outages.end("a") is None
    assert outages.end("b") is not None


# --- the fields of the records that a watch logs


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        (["shop.a"], "shop.a", {"processor": "shop.a", "worker": 2}),
        (["shop.a"], None, {"processor": "shop.a", "worker": 2}),
        (["shop.a", "shop.b"], None, {"worker": 2}),
    ],
)
def test_a_worker_that_died_is_named_in_its_record(
    names: list[str], name: str | None, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    written, _, _ = output()
    with caplog.at_level(logging.INFO, "dcl_processor"):
        log = _Log(written, names, Health(names, Stop()))
        log.tell(2, name, Died(Trouble("killed by SIGKILL"), None))
    [record] = caplog.records
    known = {each: vars(record)[each] for each in ("processor", "worker") if each in vars(record)}
    assert known == expected
    assert "killed by SIGKILL" in record.getMessage()


def test_the_line_about_a_dead_worker_has_its_row_and_what_it_leaves() -> None:
    """Nothing else mentions a charge that was cut off, until a person asks."""
    written, _, err = output()
    call = AtWork.of(Call("shop.charge", (17,), None))
    log = _Log(written, ["shop.charge"], Health(["shop.charge"], Stop()), "; rows are in doubt")
    log.tell(2, None, Died(Trouble("killed by SIGKILL"), None, call))
    said = "shop.charge, worker 2: killed by SIGKILL, last seen at row 17 since "
    assert err.getvalue().startswith(said)
    assert err.getvalue().endswith(" of shop.charge; rows are in doubt\n")
