"""A private PostgreSQL from Debian's ``postgresql``: older than the embedded.

python -m tests.servers.postgresql -- COMMAND…

runs COMMAND with ``DATABASE_URL`` set to the server's, and stops the server when it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from .software import Software, run_with

SOFTWARE = Software("PostgreSQL", ("initdb", "postgres"), package="postgresql", user="postgres")
is_installed = SOFTWARE.is_installed


@contextmanager
def postgresql() -> Iterator[str]:
    """Run a PostgreSQL for the ``with`` block, and give the URL of an empty server."""
    install, server = SOFTWARE.find()
    with SOFTWARE.folder() as folder:
        data = str(folder / "data")
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8"]
        SOFTWARE.run(folder, install, "-D", data, *options)
        options = ["-D", data, "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        socket = folder / ".s.PGSQL.5432"
        with SOFTWARE.serving(folder, server, *options, is_ready=socket.exists):
            yield f"postgres://postgres@:5432/{quote(str(folder), safe='')}/postgres"


if __name__ == "__main__":
    sys.exit(run_with(postgresql, sys.argv[1:]))
