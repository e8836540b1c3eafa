"""Adopt a table with a million rows, as the page says, and see what happens otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.databases import database_url
from tests.docs.reader import Reader, connected, empty_database, project

#: Orders of the last years. The page says a million, and the first order of today comes after that.
ROWS = int(os.environ.get("ADOPT_ROWS", "1000000"))

BEFORE = """
from django.db import models


class Order(models.Model):
    address = models.CharField(max_length=100)
    shipped_at = models.DateTimeField(null=True)
"""

# The old orders, then three of today, and one that has not shipped.
HISTORY = """
INSERT INTO orders_order (address, shipped_at)
    SELECT 'Main Street', now() - interval '1 day' - interval '1 minute' * n
    FROM generate_series(1, %(rows)s) n;
SELECT setval(pg_get_serial_sequence('orders_order', 'id'), 1000000);
INSERT INTO orders_order (address, shipped_at)
    SELECT 'Main Street', now() - interval '1 hour' FROM generate_series(1, 3);
INSERT INTO orders_order (address) VALUES ('Side Street')
"""

SEND = "python manage.py processors run orders.send_shipped_emails"


class Table(NamedTuple):
    """The orders: whose project it is, and a connection to their database."""

    reader: Reader
    connection: Any

    def ask(self, sql: str, **values: Any) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def file(self) -> Any:
        """Return the number of the table's file; a table that is rewritten gets another one."""
        return self.ask("SELECT relfilenode FROM pg_class WHERE relname = 'orders_order'")[0][0]

    def sent(self) -> int:
        return int(self.ask("SELECT count(*) FROM orders_order WHERE shipped_email_sent")[0][0])

    def type(self, command: str, *, code: int = 0) -> str:
        printed = self.reader.run(command)
        assert self.reader.exit_code == code, printed
        return printed

    def pending(self) -> str:
        listed = self.type("python manage.py processors list")
        return listed.splitlines()[1].split()[0]


@pytest.fixture
def table(tmp_path: Path, transactional_db: None) -> Iterator[Table]:
    """Give a project whose table has no flag yet."""
    with empty_database("adopt") as name, connected(name) as ours:
        table = Table(
            Reader("howto/adopt.md", tmp_path, {"DATABASE_URL": database_url(name)}), ours
        )
        project(tmp_path, "orders")
        (tmp_path / "orders" / "models.py").write_text(BEFORE, encoding="utf-8")
        table.type("python manage.py makemigrations --verbosity 0")
        table.type("python manage.py migrate --verbosity 0")
        yield table


def test_old_rows_are_done_and_only_those_that_are_put_back_are_handled(table: Table) -> None:
    """No old row is written, not even by the migration: the table stays in its file."""
    table.ask(HISTORY, rows=ROWS)
    file = table.file()
    table.reader.follow()
    assert table.file() == file
    assert table.pending() == "0"
    assert table.sent() == ROWS + 4


def test_with_the_plain_default_the_maximum_keeps_the_old_rows_from_being_handled(
    table: Table,
) -> None:
    table.ask(HISTORY, rows=12_000)
    table.reader.write_files()
    migration = table.reader.folder / "orders" / "migrations" / "0002_order_shipped_email_sent.py"
    done_first = migration.read_text(encoding="utf-8")
    migration.write_text(done_first.replace("default=True", "default=False"), encoding="utf-8")
    table.type("python manage.py migrate --verbosity 0")
    assert table.pending() == "10,000+"
    refused = table.type(SEND, code=1)
    assert "expected at most max_pending=1000 pending rows" in refused
    assert table.sent() == 0
    assert "1 processed" in table.type(f"{SEND} --limit 1")
    assert table.sent() == 1
    (lines,) = re.findall(
        r"^(last = .*?)\n```",
        table.reader.page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    piece = lines.replace("shipped_at__lt=…", "pk__lte=1_000_000")
    program = table.reader.folder / "pieces.py"
    program.write_text(f"from orders.models import Order\n{piece}\n\n", encoding="utf-8")
    table.type("python manage.py shell --no-imports < pieces.py")
    assert table.pending() == "3"
    assert "3 processed" in table.type(SEND)


# --- follow the tutorial to the letter, in an empty folder and a database of its own


@pytest.mark.django_db(transaction=True)
def test_every_step_does_what_the_page_says(tmp_path: Path) -> None:
    with empty_database("tutorial") as name:
        Reader("tutorial.md", tmp_path, {"DATABASE_URL": database_url(name)}).follow()
    assert len(list((tmp_path / "printed").iterdir())) == 61
