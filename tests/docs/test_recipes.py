"""Copy each recipe whole into an empty project, do what it says, and see that its alert alarms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import django
import pytest
from django.db import connection

from tests.databases import database_url
from tests.docs.blocks import commands
from tests.docs.reader import Reader, append, connected, empty_database, project
from tests.environments import ENVIRONMENTS

#: The server of the mails, which is a folder here.
MAILS = """
MAILERS["default"] = {
    "BACKEND": "django.core.mail.backends.filebased.EmailBackend",
    "OPTIONS": {"file_path": "mails"},
}
"""

TIMEOUT = "from django.core.mail import mailers; print(mailers.default.timeout)"


class Recipe(NamedTuple):
    """What a page is about; rows for its processor, what they become, and one that is stuck."""

    app: str
    processor: str
    rows: str
    printed: str
    code: int
    stuck: str


RECIPES = {
    "recipes/mail.md": Recipe(
        "orders",
        "orders.send_shipped_emails",
        "INSERT INTO orders_order (email, shipped_at, email_sent, attempts, last_error)"
        " SELECT 'anna@example.com', now(), false, 0, '' FROM generate_series(1, 3)",
        "3 processed",
        0,
        "UPDATE orders_order SET email_sent = false, shipped_at = now() - interval '2 hours'",
    ),
    "recipes/charge.md": Recipe(
        "payments",
        "payments.charge",
        "INSERT INTO payments_payment (card, amount, created_at, state, charge_id)"
        " SELECT card, 10, now(), 'due', '' FROM unnest('{good,declined}'::text[]) card",
        "1 processed, 1 discarded",
        0,
        "UPDATE payments_payment"
        " SET state = 'charging', charging_since = now() - interval '10 minutes'",
    ),
    "recipes/webhook.md": Recipe(
        "hooks",
        "hooks.send_webhooks",
        "INSERT INTO hooks_webhook"
        " (customer, url, payload, created_at, state, attempts, last_error)"
        " SELECT n % 2, 'https://example.com', '{}', now(), 'new', 0, ''"
        " FROM generate_series(1, 6) n",
        "6 processed",
        0,
        "UPDATE hooks_webhook SET state = 'failed'",
    ),
    "recipes/nightly.md": Recipe(
        "accounts",
        "accounts.score_accounts",
        "INSERT INTO accounts_account (score, scored_on)"
        " SELECT 0, '2024-01-01' FROM generate_series(1, 1200)",
        "1200 processed",
        0,
        "UPDATE accounts_account SET scored_on = scored_on - 1",
    ),
}


@pytest.fixture
def database(transactional_db: None) -> Iterator[str]:
    """Give an empty database, and see that the one of the recipe's own tests is not there."""
    with empty_database("recipe") as name:
        with connection.cursor() as cursor:
            cursor.execute(f'DROP DATABASE IF EXISTS "test_{name}" WITH (FORCE)')
        yield name


def copied(page: str, folder: Path, database: str) -> Reader:
    """Copy a recipe into a new project, see its tests pass, and type its commands."""
    app = RECIPES[page].app
    project(folder, app)
    reader = Reader(page, folder, {"DATABASE_URL": database_url(database)})
    reader.write_files()
    for command in (f"makemigrations {app}", "migrate", f"test {app} --noinput"):
        printed = reader.run(f"python manage.py {command}")
        assert reader.exit_code == 0, printed
    assert "\nOK\n" in printed
    reader.type_commands()
    return reader


def typed(page: Path, option: str) -> str:
    """Return the page's command with this option."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [command for block in blocks for command, _ in commands(block)]
    [found] = [command for command in lines if f" {option} " in command]
    return found.removeprefix("$ ")


pytestmark = pytest.mark.skipif(
    not django.__version__.startswith(ENVIRONMENTS[-1].django),
    reason="readers begin with the newest Django's startproject",
)


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_works_in_an_empty_project(page: str, tmp_path: Path, database: str) -> None:
    recipe = RECIPES[page]
    reader = copied(page, tmp_path, database)
    append(tmp_path, MAILS)
    with connected(database) as ours, ours.cursor() as own:
        own.execute(recipe.rows)
        printed = reader.run(f"python manage.py processors run {recipe.processor} --timeout 50")
        assert recipe.printed in printed
        assert reader.exit_code == 0, printed
        asks = typed(reader.page, "--fail-if")
        assert reader.run(asks) == ""
        own.execute(recipe.stuck)
    assert "CommandError" in reader.run(asks)
    assert reader.exit_code == 1
    mails = "".join(each.read_text("utf-8") for each in tmp_path.glob("mails/*"))
    assert mails.count("Subject: Shipped") == (3 if recipe.app == "orders" else 0)


def test_the_recipe_of_mails_limits_a_mail_and_puts_back_those_that_were_given_up(
    tmp_path: Path, database: str
) -> None:
    page = "recipes/mail.md"
    recipe = RECIPES[page]
    reader = copied(page, tmp_path, database)
    assert reader.run(f"python manage.py shell -v 0 -c '{TIMEOUT}'") == "10\n"
    append(tmp_path, MAILS)
    with connected(database) as ours, ours.cursor() as own:
        own.execute(recipe.rows)
        own.execute("UPDATE orders_order SET attempts = 5, last_error = 'OSError' WHERE id < 3")
        printed = reader.run(typed(reader.page, "--given-up"))
        assert (reader.exit_code, " put back into pending" in printed) == (0, True), printed
        own.execute("SELECT id, attempts, last_error FROM orders_order ORDER BY id")
        assert own.fetchall() == [(1, 0, ""), (2, 0, ""), (3, 0, "")]
    assert recipe.printed in reader.run(f"python manage.py processors run {recipe.processor}")
