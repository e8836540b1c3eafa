"""What the private servers have in common: whose programs they are, where they live, how they end.

A server lives in a temporary folder of its own, and listens on a socket there, so that no port can
be taken. It never runs as root, and it ends with the process that started it, by ``kill -9`` or
otherwise.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PATIENCE, until


class ServerMissingError(RuntimeError):
    """The programs are not installed."""


@dataclass(frozen=True, slots=True)
class Software:
    """A server's programs, and the Debian package that brings them.

    ``user``: as whom root runs them.
    """

    name: str
    programs: tuple[str, ...]
    package: str
    user: str

    def is_installed(self) -> bool:
        """Say whether the programs are there."""
        return all(_find(each) for each in self.programs)

    def find(self) -> list[str]:
        """Return the programs' paths; raises ``ServerMissingError`` if one is not there."""
        found = {each: _find(each) for each in self.programs}
        if missing := [each for each, path in found.items() if path is None]:
            raise ServerMissingError(
                f"Expected {' and '.join(found)} on this machine, got no "
                f"{' and no '.join(missing)}: install Debian's {self.package}."
            )
        return [path for path in found.values() if path is not None]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Make a folder for the ``with`` block, which the server may write to."""
        with tempfile.TemporaryDirectory(prefix=f"dcl-{self.name.lower()}-") as name:
            if identity := self._identity():
                shutil.chown(name, identity.pw_uid, identity.pw_gid)
            yield Path(name)

    def run(self, folder: Path, *command: str) -> None:
        """Run one of the programs to its end; raises ``CalledProcessError`` if it fails."""
        with _log(folder).open("ab") as log:
            subprocess.run([*self._as_whom(), *command], check=True, stdout=log, stderr=log)

    @contextmanager
    def serving(self, folder: Path, *command: str, is_ready: Callable[[], bool]) -> Iterator[None]:
        """Run the server for the ``with`` block, from when it is ready.

        Raises ``RuntimeError``, with the last it said, if it ends before.
        """
        with _log(folder).open("ab") as log:
            # Of its own session: Ctrl-C is for who started it, and still needs the server then.
            process = subprocess.Popen(
                [*self._as_whom(), *command], stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(lambda: is_ready() or process.poll() is not None, f"{self.name} to start")
            if process.poll() is not None:
                said = _log(folder).read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Expected {self.name} to start, but it did not:\n{said}")
            yield
        finally:
            _stop(process)

    def _identity(self) -> pwd.struct_passwd | None:
        return pwd.getpwnam(self.user) if os.geteuid() == 0 else None

    def _as_whom(self) -> list[str]:
        """Return the prefix that runs a command without root's rights, and ends it with us."""
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            return []
        user: list[str] = []
        if identity := self._identity():
            user = [f"--reuid={identity.pw_uid}", f"--regid={identity.pw_gid}", "--init-groups"]
        return [setpriv, *user, "--pdeathsig=KILL"]


def _find(program: str) -> str | None:
    # Debian puts servers where an ordinary user's PATH does not lead.
    folders = ["/usr/sbin", "/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    return shutil.which(program, path=":".join([os.environ.get("PATH", os.defpath), *folders]))


def _log(folder: Path) -> Path:
    return folder / "log"


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGINT would have some wait for their clients to leave.
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_with(server: Callable[[], AbstractContextManager[str]], arguments: Sequence[str]) -> int:
    """Run the command after ``--`` with a server's URL as ``DATABASE_URL``; return its exit code.

    ``server``: runs the server for the ``with`` block, and gives its URL.
    """
    if arguments[:1] != ["--"] or not arguments[1:]:
        print("Usage: python -m tests.servers.NAME -- COMMAND…", file=sys.stderr)
        return 2
    # Python would end at once, and the server with its folder would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with server() as url:
            return subprocess.call(arguments[1:], env={**os.environ, "DATABASE_URL": url})
    except ServerMissingError as error:
        print(error, file=sys.stderr)
        return 2
