"""Adopt a table that has rows, as the page says, and see what happens otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reader import Reader, empty_database, url_of

SETTINGS = """
from environ import Env

INSTALLED_APPS += ["dcl_processor", "orders"]
DATABASES = {"default": Env().db_url("DATABASE_URL")}
"""

BEFORE = """
from django.db import models


class Order(models.Model):
    address = models.CharField(max_length=100)
    shipped_at = models.DateTimeField(null=True)
"""

# 300 orders of the last years, three of today, and one that has not shipped.
HISTORY = """
from datetime import timedelta
from django.utils import timezone
from orders.models import Order

now = timezone.now()
days = [timedelta(days=days) for days in range(1, 301)] + [timedelta(hours=1)] * 3
Order.objects.bulk_create([Order(address="Main Street", shipped_at=now - ago) for ago in days])
Order.objects.create(address="Side Street")
"""


@pytest.fixture
def reader(tmp_path: Path, transactional_db: None) -> Iterator[Reader]:
    """Give a reader in a project whose table has rows, and no flag yet."""
    with empty_database("adopt") as name:
        reader = Reader("howto/adopt.md", tmp_path, {"DATABASE_URL": url_of(name)})
        _type(reader, "python -m django startproject office .")
        _type(reader, "python manage.py startapp orders")
        with (tmp_path / "office" / "settings.py").open("a", encoding="utf-8") as settings:
            settings.write(SETTINGS)
        (tmp_path / "orders" / "models.py").write_text(BEFORE, encoding="utf-8")
        (tmp_path / "fill.py").write_text(HISTORY, encoding="utf-8")
        _type(reader, "python manage.py makemigrations --verbosity 0")
        _type(reader, "python manage.py migrate --verbosity 0")
        _type(reader, "python manage.py shell --no-imports < fill.py")
        yield reader


def test_old_rows_are_done_and_only_those_that_are_put_back_are_handled(reader: Reader) -> None:
    reader.follow()
    assert _pending(reader) == 0


def test_with_the_plain_default_every_old_row_is_pending(reader: Reader) -> None:
    reader.write_files()
    migration = reader.folder / "orders" / "migrations" / "0002_order_shipped_email_sent.py"
    done_first = migration.read_text(encoding="utf-8")
    migration.write_text(done_first.replace("default=True", "default=False"), encoding="utf-8")
    _type(reader, "python manage.py migrate --verbosity 0")
    assert _pending(reader) == 303


def _type(reader: Reader, command: str) -> None:
    printed = reader.run(command)
    assert reader.exit_code == 0, printed


def _pending(reader: Reader) -> int:
    listed = reader.run("python manage.py processors list")
    return int(listed.splitlines()[1].split()[0])
