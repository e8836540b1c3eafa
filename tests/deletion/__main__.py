"""Delete each part of the edge from a copy of the tree, and run what is left of the tests.

python -m tests.deletion [PART…] [--sample 6] [--share 6] [--keep FOLDER]

With a part go the parts that import it, all their own tests and pages (``parts.toml``), and what
uses them in the front, in other tests and in the shop. Nothing may be left that does not work: each
module is imported, ``manage.py check`` runs, all tests are collected, and they pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.deletion.cutting import File, cut, is_gone
from tests.environments import CHECKOUT
from tests.mutants.__main__ import LEFT_BEHIND
from tests.shape import Package
from tests.shares import selected_by

#: What may name a part and goes on without it: the rest of the package imports nothing of it.
FRONT = ("dcl_processor/apps.py", "dcl_processor/decorator.py", "dcl_processor/processor.py")

#: Tests that compare the whole tree with lists of what is in it, and programs of their own.
WHOLE_TREE = (
    "tests/docs",
    "tests/test_django_internals.py",
    "tests/test_packaging.py",
    "tests/test_shape.py",
    "tests/test_suite.py",
    *("tests/benchmarks", "tests/chaos", "tests/deletion", "tests/explorer", "tests/mutants"),
)
FAST = ("tests/contract", "tests/test_")

IMPORT_ALL = """
import django, importlib, pkgutil, dcl_processor
django.setup()
for each in pkgutil.walk_packages(dcl_processor.__path__, "dcl_processor."):
    if "commands" not in each.name or "management" in each.name:
        importlib.import_module(each.name)
"""


@dataclass(frozen=True)
class Part:
    """A table of ``parts.toml``, which says what each field means."""

    name: str
    on: Sequence[str]
    files: Sequence[str]
    words: Sequence[str] = ()
    lines: Mapping[str, str] | None = None

    @property
    def package(self) -> str:
        return f"dcl_processor.{self.name}"


def parts() -> dict[str, Part]:
    listed = tomllib.loads((CHECKOUT / "tests/deletion/parts.toml").read_text("utf-8"))
    return {name: Part(name, **table) for name, table in listed.items()}


def falling(name: str, known: Mapping[str, Part]) -> list[Part]:
    """Return the part, and those that import it or one of these."""
    found = {name}
    while more := {each.name for each in known.values() if found & {*each.on}} - found:
        found |= more
    return [known[each] for each in known if each in found]


def arrows(known: Mapping[str, Part]) -> Iterator[str]:
    """Yield what imports a part, and is not said to; imports inside a function may be left."""
    package = Package.read(CHECKOUT / "dcl_processor")
    for module in package.modules.values():
        own = next((each for each in known.values() if is_gone(module.name, {each.package})), None)
        if own is None and f"{module.name.replace('.', '/')}.py" in FRONT:
            continue
        for each in known.values():
            allowed = own is not None and (each is own or each.name in own.on)
            if not allowed and any(
                is_gone(n, {each.package}) for n in module.names(in_functions=False)
            ):
                yield f"expected {module.name} not to import {each.package}"


def copy(folder: Path) -> None:
    shutil.copytree(CHECKOUT, folder, ignore=LEFT_BEHIND, dirs_exist_ok=True)


def delete(fallen: Sequence[Part], folder: Path) -> int:
    """Delete the parts from the copy; return how many single tests of other files went, too."""
    gone: set[str] = set()
    for each in (name for part in fallen for name in part.files):
        path = folder / each
        gone.add(each.removesuffix(".py").replace("/", "."))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # it may lie in a folder of another part
    for name, word in ((n, w) for part in fallen for n, w in (part.lines or {}).items()):
        lines = (folder / name).read_text("utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(line for line in lines if word not in line), "utf-8")
    others = [*folder.glob("tests/**/*.py"), *folder.glob("sample_app/**/*.py")]
    for path in others:
        text = path.read_text("utf-8")
        less = re.sub(
            r'^ *"([\w.]+)",\n',
            lambda found: "" if is_gone(found[1], gone) else found[0],
            text,
            flags=re.MULTILINE,
        )
        if less != text:
            path.write_text(less, "utf-8")
    paths = [folder / each for each in FRONT]
    paths += [
        *folder.glob("tests/**/*.py"),
        *folder.glob("sample_app/**/*.py"),
        folder / "conftest.py",
    ]
    files = [File(each, folder) for each in paths if each.exists()]
    return cut(files, gone, [word for part in fallen for word in part.words])


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run Python in the copy; return the exit code and what it printed."""
    own = {"PYTHONPATH": str(folder), "DJANGO_SETTINGS_MODULE": "tests.settings", "CI": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **own, "SHARE": selected_by()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def left(folder: Path, sample: int) -> list[str]:
    """Return the files of tests to run: all that are left, or one in so many of the fast ones."""
    found = sorted(str(each.relative_to(folder)) for each in folder.glob("tests/**/test_*.py"))
    found = [each for each in found if not each.startswith(WHOLE_TREE)]
    if sample == 1:
        return found
    fast = [each for each in found if each.startswith(FAST)]
    return [each for each in fast if not _number(each) % sample]


def _number(name: str) -> int:
    return int(sha256(f"{selected_by()} {name}".encode()).hexdigest()[:8], 16)


def tried(name: str, known: Mapping[str, Part], folder: Path, options: argparse.Namespace) -> bool:
    """Delete the part, print its line of the table, and return whether what is left works."""
    fallen = falling(name, known)
    before = Package.read(CHECKOUT / "dcl_processor")
    copy(folder)
    singles = delete(fallen, folder)
    after = Package.read(folder / "dcl_processor")
    pytest = ["-m", "pytest", "-q", "-p", "no:dcl_processor", "-p", "no:cacheprovider"]
    ignored = [f"--ignore={each}" for each in WHOLE_TREE]
    steps = {
        "imports": ["-c", IMPORT_ALL],
        "check": ["-m", "django", "check"],
        "collection": [*pytest, "--collect-only", "tests", *ignored],
        "tests": [*pytest, f"--share={options.share}", *left(folder, options.sample)],
    }
    said = {}
    for step, arguments in steps.items():
        code, said[step] = run(folder, *arguments)
        if code:
            print(f"{name}: {step} of what is left:\n{said[step][-options.tail :]}", flush=True)
            said["tests"] = f"{step} failed"
            break
    last = said["tests"].strip().splitlines()[-1].strip("= ")
    with_it = ", ".join(each.name for each in fallen if each.name != name) or "-"
    lines, modules = before.lines - after.lines, len(before.modules) - len(after.modules)
    print(f"{name:21} {lines:>6,} {modules:>7} {singles:>7}  {last:38}  {with_it}", flush=True)
    return not code


def main(arguments: Sequence[str]) -> int:
    """Return 1 unless everything that is left works without each part."""
    known = parts()
    parser = argparse.ArgumentParser(prog="python -m tests.deletion")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(known))
    parser.add_argument("--sample", type=int, default=1, help="one in so many fast files")
    parser.add_argument("--share", type=int, default=1, help="one in so many sets of parameters")
    parser.add_argument("--keep", type=Path, help="an empty folder in which the copies are left")
    parser.add_argument("--tail", type=int, default=3000, help="characters of what went wrong")
    options = parser.parse_args(arguments)
    wrong = [*arrows(known)]
    for each in wrong:
        print(each)
    print(f"{'part':21} {'lines':>6} {'modules':>7} {'singles':>7}  {'left':38}  falls with it")
    for name in options.parts or known:
        keep = nullcontext(options.keep / name) if options.keep else None
        with keep or tempfile.TemporaryDirectory(prefix="dcl_deletion_") as folder:
            if not tried(name, known, Path(folder), options):
                wrong.append(name)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
