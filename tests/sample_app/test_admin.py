"""The shop's back office loads, empty and full."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import Client

from sample_app.shop.models import Order
from tests.sample_app.conftest import Start, WriteOrders, ended, order_line

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("model", ["cart", "customer", "invoice", "order", "payment"])
def test_lists_and_forms_load_without_any_rows(admin_client: Client, model: str) -> None:
    assert admin_client.get(f"/admin/shop/{model}/").status_code == 200
    assert admin_client.get(f"/admin/shop/{model}/add/").status_code == 200


# --- manage.py load_orders: the good lines get in, however bad the others are


def load(path: Path, *options: str) -> tuple[str, list[str]]:
    """Run the command; return its closing line and its complaints."""
    output, errors = StringIO(), StringIO()
    call_command("load_orders", str(path), *options, stdout=output, stderr=errors)
    return output.getvalue().strip(), errors.getvalue().splitlines()


def test_reports_bad_lines_by_number_and_keeps_the_others(write_orders: WriteOrders) -> None:
    path = write_orders(
        order_line(1),
        order_line("x"),
        order_line(2, order_date="soon"),
        "3,VINET",
        order_line(1, ship_city="Paris"),
        order_line(4),
    )

    closing, complaints = load(path)

    assert complaints == [
        "line 3: expected a whole number in order_id, got 'x'; skipped",
        "line 4: expected a date like 1996-07-04 in order_date, got 'soon'; skipped",
        "line 5: expected 10 columns, got 2; skipped",
        "line 6: order 1 is already on line 2; skipped",
    ]
    assert closing == "Orders: 2 loaded, 0 already there, 4 bad lines skipped"
    assert list(Order.objects.values_list("number", "ship_city")) == [(1, "Reims"), (4, "Reims")]


# --- the shop's commands as a user starts them: processes of their own, on a database of their own


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["load_orders", "none.csv"], {}, "Expected the shop's tables in the database"),
        (
            ["load_orders", "none.csv"],
            {"DATABASE_URL": "postgres://nobody@127.0.0.1:1/none"},
            "Expected a database that answers",
        ),
        (["demo", "--orders", "none.csv"], {}, "Expected a file that can be read, got none.csv: "),
        (["demo"], {"EMAIL_URL": "pigeon://roof"}, "The settings are not usable: "),
        (["demo"], {"EMAIL_URL": "", "EMAIL_HOST": "h", "EMAIL_PORT": "x"}, "EMAIL_PORT, got"),
        (["demo"], {"DATABASE_URL": "sqlite"}, "got one that begins with 'sqlite'"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(
    start: Start, arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    code, _, errors = ended(start(*arguments, **environment))

    assert code == 1
    [line] = errors.splitlines()
    assert complaint in line
