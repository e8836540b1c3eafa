"""Keep one embedded PostgreSQL alive for as long as a process uses it.

``sample_app.embedded`` runs this file as a detached process, one for each folder. It needs only the
standard library, so that it starts at once and works with ``python -I -S``.

Four facts must survive any ``kill -9``, so each is a lock that the kernel releases, never a process
id in a file, which another process may have by now:

* ``users.lock``, shared: held by the processes that use the server;
* ``users.lock``, exclusive: no process uses the server, and it is being stopped;
* ``supervisor.lock``: this process lives (the starting process takes the lock, and hands it on);
* ``server.lock``: a process of ``initdb`` or ``postgres`` lives; they inherit the lock from here.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PORT = 5432
MAX_CONNECTIONS = 200
POLL = 0.1  # seconds
STOP_WITHIN = 20.0  # seconds, after which the server is made to quit without a checkpoint

#: The environment variable that turns fsync on, which measurements need. With fsync off, the data
#: survive any kill but no power cut; sample data are not worth the wait.
FSYNC = "EMBEDDED_FSYNC"

INITDB_OPTIONS = (
    "--username=postgres",
    "--auth=trust",  # the socket lies in a folder that no other user may enter
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",  # the same sort order on every platform
    "--builtin-locale=C.UTF-8",
    "--no-sync",
    "--no-instructions",
)


def try_lock(path: Path, mode: int = fcntl.LOCK_EX) -> int | None:
    """Take the lock without waiting; return its descriptor, or None if others hold it.

    ``flock``, not ``lockf``: the lock belongs to the open file, so forked children keep it, and
    closing another descriptor of the same file does not release it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether any process holds the lock."""
    descriptor = try_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def supervise(home: Path, wheel: Path, supervisor_lock: int) -> None:
    """Start the server in ``home``, or adopt the running one; stop it when no process uses it."""
    server: subprocess.Popen[bytes] | None = None
    while (users_lock := try_lock(home / "users.lock")) is None:
        if server is None:
            # If the lock is held, the supervisor of a server was killed (adopt the server), or the
            # supervisor of an initdb was killed (wait for it).
            server_lock = try_lock(home / "server.lock")
            if server_lock is not None:
                server = _start(home, wheel, server_lock)
                os.close(server_lock)
        elif server.poll() is not None:
            return  # the server ended without a stop; the log says why
        time.sleep(POLL)
    _stop(home, server)
    # In this order: a process that waits for users.lock must find no supervisor once it gets it.
    os.close(supervisor_lock)
    os.close(users_lock)


def _start(home: Path, wheel: Path, server_lock: int) -> subprocess.Popen[bytes]:
    identity = server_user()
    binaries = _reachable(home, wheel) if identity else wheel / "bin"
    how: dict[str, Any] = {**identity, "pass_fds": (server_lock,), "cwd": "/"}
    data = home / "data"
    if not data.exists():
        _make_data(home, binaries, how)
    # This process holds server.lock, so no server of this folder lives; another process may have
    # its old process id by now.
    for stale in ("postmaster.pid", f".s.PGSQL.{PORT}.lock"):
        (data / stale).unlink(missing_ok=True)
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": f'"{data}"',
        "port": PORT,
        "max_connections": MAX_CONNECTIONS,
        "fsync": os.environ.get(FSYNC, "off"),
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return subprocess.Popen([str(binaries / "postgres"), "-D", str(data), *options], **how)


def _make_data(home: Path, binaries: Path, how: dict[str, Any]) -> None:
    """Make the data folder under another name and rename it, so that it is complete or absent."""
    fresh = home / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if "user" in how:
        os.chown(fresh, how["user"], how["group"])
    command = [str(binaries / "initdb"), "-D", str(fresh), *INITDB_OPTIONS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **how)
    fresh.rename(home / "data")


def _stop(home: Path, server: subprocess.Popen[bytes] | None) -> None:
    """End the server with a checkpoint, or, after ``STOP_WITHIN`` seconds, without one."""
    pid_file = home / "data" / "postmaster.pid"
    for how in (signal.SIGINT, signal.SIGQUIT):
        # The file can be trusted only while the lock is held, because then the server lives.
        if is_locked(home / "server.lock") and pid_file.exists():
            os.kill(int(pid_file.read_text().split("\n", 1)[0]), how)
        deadline = time.monotonic() + STOP_WITHIN
        while is_locked(home / "server.lock") and time.monotonic() < deadline:
            time.sleep(POLL / 5)
    if server is not None:
        server.wait(STOP_WITHIN)


def server_user() -> dict[str, Any]:
    """Return the user to run PostgreSQL as, because it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam("nobody")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}


def _reachable(home: Path, wheel: Path) -> Path:
    """Copy the binaries to where another user may run them, and return their folder.

    Root's checkout may lie in a folder that only root may enter, and this module must not open that
    to all users. The copy keeps the wheel's layout, because the linker's paths are relative to it.
    """
    package = wheel.parent
    stamp = f"{wheel.stat().st_mtime_ns:x}"  # changes when the package is upgraded
    copy = home / f"wheel-{stamp}"
    if not copy.exists():
        part = home / "wheel-part"
        shutil.rmtree(part, ignore_errors=True)
        unused = shutil.ignore_patterns("include", "__pycache__", "pginstall", "*.a")
        shutil.copytree(package, part / package.name, symlinks=True, ignore=unused)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, part / libraries.name)
        for path in (part, *part.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        part.rename(copy)
    return copy / package.name / wheel.name / "bin"


def main() -> int:
    home, wheel, supervisor_lock = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if os.fork():
        return 0  # the starting process need not wait for the child, nor reap it
    os.setsid()
    try:
        supervise(home, wheel, supervisor_lock)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
