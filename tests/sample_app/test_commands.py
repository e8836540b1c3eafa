"""The shop's commands as a user starts them: processes of their own, on a database of their own."""

from __future__ import annotations

import smtplib

import django
import pytest
from django.core import mail
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend
from django.test import override_settings
from environ import Env

from sample_app.database_settings import database_settings
from sample_app.mail_settings import mail_settings
from sample_app.shop.demo.mailbox import HOST, DeliveredMail, Mailbox
from sample_app.shop.demo.workers import Share, run_workers
from tests.sample_app.conftest import LookAtOrders, Start, WriteOrders, ended, order_line


def test_two_loaders_of_the_same_file_share_its_orders(
    start: Start, write_orders: WriteOrders, look_at_orders: LookAtOrders
) -> None:
    path = write_orders(
        *(order_line(number, customer_id=f"C{number % 50}") for number in range(1, 3001))
    )
    assert ended(start("migrate", "-v0"))[0] == 0

    loaders = [start("load_orders", path) for _ in range(2)]
    results = [ended(loader) for loader in loaders]

    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    counts = [
        tuple(int(word.replace(",", "")) for word in output.split() if word[0].isdigit())
        for _, output, _ in results
    ]
    assert tuple(map(sum, zip(*counts, strict=True))) == (3000, 3000, 0)
    assert look_at_orders().keys() == set(range(1, 3001))


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["load_orders", "none.csv"], {}, "Expected the shop's tables in the database"),
        (
            ["load_orders", "none.csv"],
            {"DATABASE_URL": "postgres://nobody@127.0.0.1:1/none"},
            "Expected a database that answers",
        ),
        (
            ["demo"],
            {"DATABASE_URL": "postgres://nobody@127.0.0.1:1/none"},
            "Expected a database that answers",
        ),
        (
            ["demo", "--orders", "none.csv"],
            {},
            "Expected a file that can be read, got none.csv: No such file or directory.",
        ),
        (["demo"], {"EMAIL_URL": "pigeon://roof"}, "The settings are not usable: "),
        (["demo"], {"EMAIL_URL": "", "EMAIL_HOST": "h", "EMAIL_PORT": "x"}, "EMAIL_PORT, got"),
        (["demo"], {"DATABASE_URL": "oracle"}, "got one that begins with 'oracle'"),
        (["demo"], {"DATABASE_URL": "sqlite"}, "got one that begins with 'sqlite'"),
        (["demo"], {"DATABASE_URL": "postgres://h:port/n"}, "got one that cannot be read"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(
    start: Start, arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    code, _, errors = ended(start(*arguments, **environment))

    assert code == 1
    [line] = errors.splitlines()
    assert complaint in line


# --- the mail server of the demo takes in real mail and remembers it


def test_remembers_what_a_mail_says_of_itself(mailbox: Mailbox) -> None:
    headers = {"X-Order": "10248", "Message-ID": "<one@example.com>"}
    EmailMessage("Hello", "there", "a@example.com", ["b@example.com"], headers=headers).send()

    assert mailbox.mails == [DeliveredMail("<one@example.com>", "b@example.com", 10248)]


@pytest.mark.parametrize("header", ["", "X-Order: many\r\n", "X-Order: -1\r\n"])
def test_takes_a_mail_that_names_no_order(mailbox: Mailbox, header: str) -> None:
    with smtplib.SMTP(HOST, mailbox.port, local_hostname="localhost") as client:
        client.sendmail("a@example.com", ["b@example.com"], f"{header}\r\nhello\r\n")

    assert mailbox.mails == [DeliveredMail("", "b@example.com", None)]


# --- copies that go wrong differ from workers that had nothing to do


def test_a_copy_that_cannot_start_says_why(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "sample_app.settings")
    monkeypatch.setenv("DATABASE_URL", empty_database)
    watched: list[int] = []

    shares = run_workers("shop.no_such_thing", 2, watch=watched.extend)

    assert [(share.worker, share.processed, share.exit_code) for share in shares] == [
        (1, 0, 2),
        (2, 0, 2),
    ]
    assert not any(share.came_to_the_end or share.killed for share in shares)
    assert all("shop.send_shipped_emails" in share.complaint for share in shares)
    assert len(set(watched)) == 2


@pytest.mark.parametrize(
    ("exit_code", "failed", "came_to_the_end", "killed"),
    [
        (0, 0, True, False),
        (1, 3, True, False),
        (1, 0, False, False),
        (0, 3, True, False),
        (2, 0, False, False),
        (-9, 0, False, True),
        (-15, 0, False, False),
    ],
)
def test_rows_that_failed_are_no_trouble_of_the_copys(
    exit_code: int, failed: int, came_to_the_end: bool, killed: bool
) -> None:
    share = Share(1, 5, failed, 0, 0.1, exit_code, "")
    assert (share.came_to_the_end, share.killed) == (came_to_the_end, killed)


# --- what the environment says about the database and the mail, as Django's settings


def given(**variables: str) -> Env:
    """Return an environment of these variables alone."""
    env = Env()
    env.ENVIRON = variables
    return env


def settings_of(**variables: str) -> dict[str, object]:
    """Return the settings in the words of before Django 6.1."""
    settings = mail_settings(given(**variables))
    if django.VERSION < (6, 1):
        return settings
    mailer = settings["MAILERS"]["default"]
    return {"EMAIL_BACKEND": mailer["BACKEND"]} | {
        f"EMAIL_{name.upper()}": value for name, value in mailer["OPTIONS"].items()
    }


def test_mail_goes_to_the_console_unless_the_environment_says_where() -> None:
    assert settings_of() == {"EMAIL_BACKEND": "django.core.mail.backends.console.EmailBackend"}


@pytest.mark.parametrize(
    "variables",
    [
        {"EMAIL_HOST": "mail.example.com", "EMAIL_PORT": "2525"},
        {"EMAIL_URL": "smtp://mail.example.com:2525", "EMAIL_HOST": "not.this.one"},
    ],
)
def test_mail_goes_to_the_host_that_the_environment_names(variables: dict[str, str]) -> None:
    settings = settings_of(**variables)

    assert settings["EMAIL_BACKEND"] == "django.core.mail.backends.smtp.EmailBackend"
    assert (settings["EMAIL_HOST"], settings["EMAIL_PORT"]) == ("mail.example.com", 2525)


def test_the_settings_make_the_mail_backend_that_they_mean() -> None:
    url = "smtp+tls://shop:secret@mail.example.com:587"
    with override_settings(**mail_settings(given(EMAIL_URL=url))):
        backend = mail.get_connection() if django.VERSION < (6, 1) else mail.mailers.default

    assert isinstance(backend, EmailBackend)
    assert (backend.host, backend.port) == ("mail.example.com", 587)
    assert (backend.username, backend.password) == ("shop", "secret")
    assert backend.use_tls


@pytest.mark.parametrize(
    ("url", "engine"),
    [
        ("postgres://me:secret@db.example.com:5432/shop", "django.db.backends.postgresql"),
        ("mysql://me:secret@db.example.com/shop", "django.db.backends.mysql"),
        ("sqlite:////tmp/shop", "django.db.backends.sqlite3"),
    ],
)
def test_the_database_is_the_one_that_the_environment_names(url: str, engine: str) -> None:
    assert database_settings(given(DATABASE_URL=url))["ENGINE"] == engine
