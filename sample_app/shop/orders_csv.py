"""Reads an order file line by line: every line gives an order, or the reason why it does not."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from pathlib import Path

COLUMNS = (
    "order_id",
    "customer_id",
    "company",
    "contact_name",
    "order_date",
    "required_date",
    "shipped_date",
    "freight",
    "ship_city",
    "ship_country",
)
CENT = Decimal("0.01")
AMOUNT_LIMIT = 100_000_000
# Decimal() alone would accept NaN, underscores and other scripts' digits.
AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")
ORDER_ID = re.compile(r"[0-9]{1,18}")
# Narrow on purpose: the code becomes the local part of an e-mail address.
CUSTOMER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}")
NAME = re.compile(r".+")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class OrderFileError(Exception):
    """The file as a whole cannot be used; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was skipped: its number in the file, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedOrder:
    """A good line of the file."""

    line: int
    number: int
    customer_code: str
    company: str
    contact_name: str
    order_date: date
    required_date: date
    shipped_date: date | None
    freight: Decimal
    ship_city: str
    ship_country: str


def read_orders(path: Path) -> Iterator[ParsedOrder | BadLine]:
    """Yield the result of each line after the header; raise OrderFileError for an unusable file."""
    try:
        # Undecodable bytes become surrogates, which make their line a bad line, not the whole file.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            header = _header(path, file.readline())
            for number, text in enumerate(file, start=2):
                if text.strip():
                    yield _read_line(number, text, header)
    except OSError as error:
        raise OrderFileError(
            f"Expected a file that can be read, got {path}: {error.strerror}."
        ) from error


def _header(path: Path, text: str) -> list[str]:
    expected = f"expected a CSV file whose first line names the columns {', '.join(COLUMNS)}"
    try:
        header = [name.strip() for name in _cells(text)]
    except ValueError as error:
        raise OrderFileError(f"{path}: {expected}, got one whose first line {error}.") from error
    if missing := [name for name in COLUMNS if header.count(name) != 1]:
        raise OrderFileError(
            f"{path}: {expected}, got these missing or named twice: {', '.join(missing)}."
        )
    return header


def _read_line(line: int, text: str, header: list[str]) -> ParsedOrder | BadLine:
    try:
        cells = _cells(text)
        if len(cells) == len(header):
            return _order(line, dict(zip(header, map(str.strip, cells), strict=True)))
    except ValueError as error:
        return BadLine(line, str(error))
    return BadLine(line, f"expected {len(header)} columns, got {len(cells)}")


def _cells(text: str) -> list[str]:
    # One line is one order. If a quoted cell could contain line ends, a single stray quote would
    # swallow every order after it.
    try:
        text.encode()
        return next(csv.reader([text], strict=True), [])
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8 text") from None
    except csv.Error as error:
        raise ValueError(f"is not a complete line of CSV ({error})") from None


def _order(line: int, cells: Mapping[str, str]) -> ParsedOrder:
    return ParsedOrder(
        line=line,
        number=int(_matching(cells, "order_id", ORDER_ID, "a whole number")),
        customer_code=_matching(
            cells, "customer_id", CUSTOMER_ID, "up to 20 letters, digits, - or _"
        ),
        company=_matching(cells, "company", NAME, "a name"),
        contact_name=cells["contact_name"],
        order_date=_date(cells, "order_date"),
        required_date=_date(cells, "required_date"),
        shipped_date=_date(cells, "shipped_date") if cells["shipped_date"] else None,
        freight=_amount(cells, "freight"),
        ship_city=cells["ship_city"],
        ship_country=cells["ship_country"],
    )


def _matching(cells: Mapping[str, str], column: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(cells[column]):
        raise _unexpected(cells, column, what)
    return cells[column]


def _date(cells: Mapping[str, str], column: str) -> date:
    try:
        return date.fromisoformat(_matching(cells, column, DATE, "a date like 1996-07-04"))
    except ValueError:
        raise _unexpected(cells, column, "a date like 1996-07-04") from None


def _amount(cells: Mapping[str, str], column: str) -> Decimal:
    what = f"an amount like 32.38, below {AMOUNT_LIMIT:,}"
    try:
        amount = Decimal(_matching(cells, column, AMOUNT, what)).quantize(CENT, ROUND_HALF_UP)
    except InvalidOperation:
        raise _unexpected(cells, column, what) from None
    if amount >= AMOUNT_LIMIT:
        raise _unexpected(cells, column, what)
    return amount


def _unexpected(cells: Mapping[str, str], column: str, what: str) -> ValueError:
    got = repr(cells[column]) if cells[column] else "nothing"
    return ValueError(f"expected {what} in {column}, got {got}")
