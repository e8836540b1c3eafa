"""What is shipped, and what the metadata claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from hashlib import sha256
from pathlib import Path

import pytest

from tests.environments import CHECKOUT, ENVIRONMENTS


def build(folder: Path) -> dict[str, str]:
    """Build the sdist, and the wheel from it; return the digest of each file."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    return {each.name: sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (made,) = built.glob("dcl_processor-*.whl")
    with zipfile.ZipFile(made) as opened:
        return opened


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    with zipfile.ZipFile(str(wheel.filename)) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = {
        str(path.relative_to(CHECKOUT))
        for path in Path(CHECKOUT, "dcl_processor").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == package
    assert "dcl_processor/py.typed" in shipped


def test_django_is_all_it_needs(metadata: Message) -> None:
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["django>=5.2"]


def test_every_version_claimed_has_an_environment_in_the_suite(metadata: Message) -> None:
    claimed = metadata.get_all("Classifier", [])
    versions = {
        framework: {line.rsplit(" ", 1)[1] for line in claimed if re.search(pattern, line)}
        for framework, pattern in {
            "django": r"^Framework :: Django :: \d",
            "python": r"^Programming Language :: Python :: \d\.",
        }.items()
    }
    assert versions["django"] == {each.django for each in ENVIRONMENTS}
    assert versions["python"] == {each.python for each in ENVIRONMENTS}


def test_the_oldest_python_claimed_is_the_one_required() -> None:
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    oldest = min((each.python for each in ENVIRONMENTS), key=lambda each: int(each.split(".")[1]))
    assert project["project"]["requires-python"] == f">={oldest}"
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_the_sdist_has_what_a_packager_needs(built: Path) -> None:
    (made,) = built.glob("dcl_processor-*.tar.gz")
    with tarfile.open(made) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md"} <= names


PROJECT = """
import django, sys
from django.conf import settings
from django.core.management import call_command

apps = ["dcl_processor", "dcl_processor.ledger", "django.contrib.contenttypes"]
databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
settings.configure(INSTALLED_APPS=apps, DATABASES=databases, USE_TZ=True)
django.setup()
import dcl_processor
from dcl_processor import batch_processor
from django.contrib.contenttypes.models import ContentType

handled = []
rows = ContentType.objects.filter(app_label="waits")


@batch_processor(pending=rows, done={"app_label": "done"})
def run(row):
    handled.append(row)


call_command("migrate", verbosity=0)
rows.create(app_label="waits")
assert run().processed == len(handled) == 1
print(dcl_processor.__file__)
"""


def test_the_wheel_works_as_it_is_installed_from_a_file(built: Path, tmp_path: Path) -> None:
    (made,) = built.glob("dcl_processor-*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", tmp_path / "there", made], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", PROJECT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "there")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert ran.stdout.startswith(str(tmp_path / "there"))
