"""What is shipped, and what the metadata claims."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.environments import CHECKOUT, ENVIRONMENTS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=CHECKOUT,
        check=True,
    )
    (built,) = folder.glob("dcl_processor-*.whl")
    with zipfile.ZipFile(built) as opened:
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
