"""What the tests of the registry, the checks, the command and the workers share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest
from django.conf import settings
from django.core.management import execute_from_command_line
from django.test import override_settings

from dcl_processor.insights import status
from tests import notes
from tests.edge.manage import Install, Manage, Ran

HEAD = (
    "from dcl_processor import BatchProcessor, batch_processor\nfrom tests.models import Parcel\n"
)


_notes = notes.of_each_test


@pytest.fixture(autouse=True)
def _no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command know of a look that another one has taken, as in processes of their own."""
    monkeypatch.setattr(status, "_looks", {})


@pytest.fixture
def install(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Install]:
    """Write an app with this processors.py (``None``: without one), and install it."""
    if "installed" in request.fixturenames:
        # First, so that it ends last: settings that are overridden later are restored before it.
        request.getfixturevalue("installed")
    monkeypatch.syspath_prepend(tmp_path)
    apps: list[str] = []
    with ExitStack() as stack:

        def install(app: str, processors: str | None) -> None:
            folder = tmp_path / app
            folder.mkdir()
            (folder / "__init__.py").touch()
            if processors is not None:
                (folder / "processors.py").write_text(HEAD + dedent(processors))
            apps.append(app)
            installed = [*settings.INSTALLED_APPS, app]
            stack.enter_context(override_settings(INSTALLED_APPS=installed))

        yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in apps]:
        del sys.modules[name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the warehouse, for commands that run in this process, and for their workers."""
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.warehouse.settings")
    # Without the ledger, as most projects are.
    others = {"dcl_processor.ledger", "tests.warehouse"}
    apps = [app for app in settings.INSTALLED_APPS if app not in others]
    with override_settings(INSTALLED_APPS=[*apps, "tests.warehouse"]):
        yield


@pytest.fixture
def faulty(installed: None) -> Iterator[None]:
    """Install an app beside the warehouse whose processors cannot run."""
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "tests.faulty"]):
        yield


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Return the folder where a handler waits until the file ``open`` is there."""
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which each handler adds its row and its process."""
    path = tmp_path / "audit"
    path.touch()
    monkeypatch.setenv("AUDIT", str(path))
    return path


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let commands see SIGINT, also where this suite runs in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def manage(
    installed: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Manage:
    """Run ``manage.py processors`` in this process, which is quicker."""
    monkeypatch.setenv("PGAPPNAME", "tests")  # which the command leaves as it is

    def manage(*arguments: str) -> Ran:
        code: object = 0
        try:
            execute_from_command_line(["manage.py", "processors", *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return Ran(code, *capsys.readouterr())

    return manage
