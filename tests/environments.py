"""The Django versions that the package's metadata claims, each under a Python that suits it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, made once and again when pyproject.toml changes."""

    django: str
    python: str

    @property
    def folder(self) -> Path:
        return CHECKOUT / f".venv-django{self.django}"

    @property
    def variable(self) -> str:
        """Name the environment variable that says where the Python is."""
        return f"PYTHON_{self.python.replace('.', '_')}"

    def find_python(self) -> str | None:
        """Return a Python of the right version that can make environments, or None."""
        return next((found for found in self._candidates() if self._suits(found)), None)

    @property
    def own_python(self) -> str:
        """Return the path of the environment's Python."""
        return str(self.folder / "bin" / "python")

    def make(self, python: str, call: Callable[..., None]) -> None:
        """Make the environment unless it is there already; ``call`` runs a command."""
        metadata = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
        made, made_from = self.folder / "made-from", f"{python}\n{metadata}"
        if not made.exists() or made.read_text() != made_from:
            call(python, "-m", "venv", "--clear", str(self.folder))
            call(
                *(self.own_python, "-m", "pip", "install", "--quiet"),
                *("--disable-pip-version-check", "--editable", ".[test]"),
                f"Django~={self.django}.0",
            )
            made.write_text(made_from)

    def _candidates(self) -> Iterator[str]:
        """Find Pythons where people have them; a pyenv shim may be on PATH and not work."""
        command = f"python{self.python}"
        if self.variable in os.environ:
            yield os.environ[self.variable]
        on_path = shutil.which(command)
        if on_path is not None:
            yield on_path
        pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
        uv = Path("~/.local/share/uv/python").expanduser()
        for root, pattern in ((pyenv, f"{self.python}.*"), (uv, f"cpython-{self.python}.*")):
            yield from (str(found) for found in sorted(root.glob(f"{pattern}/bin/{command}")))

    def _suits(self, python: str) -> bool:
        question = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            answer = subprocess.run(
                [python, "-c", question], capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return answer.stdout.strip() == self.python


ENVIRONMENTS = (
    Environment(django="5.2", python="3.11"),
    Environment(django="6.0", python="3.12"),
    Environment(django="6.1", python="3.13"),
)
