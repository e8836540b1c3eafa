"""The page for operators has the names and the limits of the code."""

from __future__ import annotations

import re
from pathlib import Path

from dcl_processor.admin_page import audit, choosing, handing_over, mixin, panels, permissions, plan
from dcl_processor.admin_page.mixin import ProcessorAdminMixin
from tests.admin_page.test_permissions import ADDRESSES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "operate.md"


def rows(heading: str) -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table]


def test_the_permissions_are_listed() -> None:
    listed = [line[0] for line in rows("Permissions")]
    assert listed == [permissions.VIEW, permissions.OPERATE, "the model's `change"]


def test_the_addresses_are_listed_with_their_arguments_and_methods() -> None:
    listed = {
        name: (set(re.findall(r"\w+", arguments)) - {"none"}, method)
        for name, arguments, method, _ in rows("Addresses")
    }
    assert listed == {
        name: ({*arguments}, "POST" if writes else "GET")
        for name, (arguments, writes) in ADDRESSES.items()
    }


def test_the_names_of_the_mixin_are_those_of_the_code() -> None:
    for name, _ in rows("`ProcessorAdminMixin`"):
        assert name in vars(ProcessorAdminMixin)


def test_the_limits_are_those_of_the_code() -> None:
    limits = [float(number.replace(",", "")) for _, number in rows("Limits")]
    assert limits == [
        panels.PANEL,
        panels.PAGE,
        choosing.MOST,
        choosing.BUDGET,
        plan.LONGEST,
        plan.MAX_AGE,
        handing_over.MOST_NOW,
        mixin.LONGEST,
        audit.MOST_ENTRIES,
    ]
