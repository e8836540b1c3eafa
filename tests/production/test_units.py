"""The systemd unit and the pod on the page about runs; systemd reads its own where it is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from asgiref.sync import sync_to_async
from django.db import connection, connections

from dcl_processor import Lease, alive
from tests.contract.support import errands as the
from tests.contract.support.sessions import connected
from tests.environments import CHECKOUT
from tests.models import Errand
from tests.waiting import PATIENCE, until

PAGE = CHECKOUT / "docs" / "howto" / "run.md"
UNIT = re.compile(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", re.DOTALL)
PYTHON = "/srv/shop/.venv/bin/python"


def units() -> dict[str, str]:
    return dict(UNIT.findall(PAGE.read_text(encoding="utf-8")))


def parsed(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's keys have capitals
    parser.read_string(text)
    return parser


def test_what_the_unit_starts_is_a_command_that_can_be_read() -> None:
    from dcl_processor.management.commands.processors import Command

    service = parsed(units()["shop-worker.service"])["Service"]
    python, manage, *arguments = service["ExecStart"].split()
    assert (python, manage, arguments[0]) == (PYTHON, "manage.py", "processors")
    parser = Command().create_parser("manage.py", "processors")
    assert parser.parse_args(arguments[1:]).action == "run"


def test_the_probes_of_the_pod_read_the_file_that_its_command_writes() -> None:
    from dcl_processor.management.commands.processors import Command

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    pod = yaml.safe_load(text)
    (worker,) = pod["containers"]
    *_, manage, name = before = worker["command"][: worker["command"].index("run")]
    assert (manage, name, before[:2]) == ("manage.py", "processors", ["tini", "--"])
    parser = Command().create_parser("manage.py", "processors")
    file = parser.parse_args(worker["command"][len(before) :]).health_file
    (mount,) = worker["volumeMounts"]
    assert mount == {"name": pod["volumes"][0]["name"], "mountPath": str(file.parent)}
    for probe in ("startupProbe", "livenessProbe"):
        command = worker[probe]["exec"]["command"]
        assert command == ["python", "-m", alive.__name__, str(file)]


def test_systemd_finds_nothing_wrong_with_them(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        return  # the test above has read them
    for name, text in units().items():
        # The command has to be there, and the user need not.
        here = text.replace(PYTHON, f'"{sys.executable}"').replace("User=shop\n", "")
        (tmp_path / name).write_text(here)
    ran = subprocess.run(
        [verifier, "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    ours = [line for line in ran.stderr.splitlines() if "shop-" in line]
    assert ours == []


# --- how many sessions a worker has


SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'counted'"
)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_sessions_of_one_worker_are_those_on_the_page() -> None:
    seen: list[int] = []

    def look() -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute(SESSIONS)
            seen.append(cursor.fetchone()[0])

    def renewed(row: Errand) -> None:
        same = Errand.objects.filter(pk=row.pk, leased_until=row.leased_until)
        until(lambda: not same.exists(), "the lease to be renewed", pause=0.05)

    def handle(row: Errand) -> None:
        if row.leased_until is not None:
            renewed(row)
        look()

    async def handle_later(row: Errand) -> None:
        await sync_to_async(renewed)(row)
        await sync_to_async(look)()

    the.errands(1)
    for make, handler in (
        (the.transactional, handle),
        (the.at_least_once, handle),
        (the.at_least_once, handle_later),
    ):
        Errand.objects.update(done=False)
        with connected({"application_name": "counted"}):
            lease = {"lease": Lease(3)} if make is the.at_least_once else {}
            assert make(handler, **lease)().processed == 1
            connection.close()
        connections["other"].close()
    assert seen == [1, 2, 3]
    page = PAGE.with_name("production.md").read_text(encoding="utf-8")
    table = page[page.index("| one worker | sessions |") :]
    assert re.findall(r"\| (\d)(?: more)? \|", table)[:3] == ["1", "2", "1"]
