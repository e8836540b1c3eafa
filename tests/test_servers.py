"""The private MariaDB serves its command and leaves nothing behind.

Part of the MariaDB stage of the suite: elsewhere the binaries may be missing.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import environ
import MySQLdb

from tests.environments import CHECKOUT
from tests.servers.mariadb import mariadb
from tests.waiting import PATIENCE, until

PRINT_URL = "import os, sys; print(os.environ['DATABASE_URL'], flush=True); sys.stdin.read()"


def test_it_serves_utf8mb4_and_is_gone_afterwards() -> None:
    with mariadb() as url:
        settings = environ.Env.db_url_config(url)
        with MySQLdb.connect(
            user=settings["USER"], db=settings["NAME"], **settings["OPTIONS"]
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT @@version, @@character_set_server")
            server, charset = cursor.fetchone()
        assert "MariaDB" in server
        assert charset == "utf8mb4"
        assert answers(socket_of(url))
    assert not answers(socket_of(url))
    assert not socket_of(url).parent.exists()


def test_the_command_gets_the_url_and_its_exit_code_is_passed_on() -> None:
    question = "import os, sys; sys.exit(7 * os.environ['DATABASE_URL'].startswith('mysql://'))"
    assert subprocess.call(command(question), cwd=CHECKOUT, timeout=PATIENCE) == 7


def test_a_killed_starter_takes_the_server_with_it() -> None:
    with subprocess.Popen(
        command(PRINT_URL), cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        socket_path = socket_of(starter.stdout.readline().strip())
        assert answers(socket_path)
        starter.kill()
    until(lambda: not answers(socket_path), "the server's end")
    shutil.rmtree(socket_path.parent)


def command(script: str) -> list[str]:
    return [sys.executable, "-m", "tests.servers.mariadb", "--", sys.executable, "-c", script]


def socket_of(url: str) -> Path:
    path = Path(parse_qs(urlsplit(url).query)["unix_socket"][0])
    assert path.is_relative_to(tempfile.gettempdir())
    return path


def answers(socket_path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(socket_path)) == 0
