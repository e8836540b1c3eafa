"""The shop's commands as a user starts them: processes of their own, on a database of their own."""

from __future__ import annotations

import pytest

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
