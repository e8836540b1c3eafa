"""Loads every good line of an order file into the database, however bad the others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time
from itertools import islice
from pathlib import Path

from django.db import DataError, IntegrityError, transaction
from django.utils import timezone

from sample_app.shop.models import Customer, Order, OrderLine
from sample_app.shop.orders_csv import BadLine, ParsedOrder, read_orders
from sample_app.shop.paperwork import add_paperwork

LINES_PER_TRANSACTION = 1_000


@dataclass(slots=True)
class Loading:
    """The load of one file, and the counts of its lines so far."""

    report_bad_line: Callable[[BadLine], None]
    lines_of: Callable[[Order], list[OrderLine]] | None = None
    loaded: int = 0
    skipped: int = 0
    already_there: int = 0
    _seen: dict[int, int] = field(default_factory=dict, init=False)

    def __str__(self) -> str:
        return (
            f"{self.loaded:,} loaded, {self.already_there:,} already there, "
            f"{self.skipped:,} bad lines skipped"
        )

    def load(self, path: Path) -> None:
        """Load the file; raise OrderFileError if it cannot be read as an order file."""
        orders = self._good_lines(path)
        while batch := list(islice(orders, LINES_PER_TRANSACTION)):
            with transaction.atomic():
                refused = list(self._insert(batch))
            for bad_line in refused:
                self._skip(bad_line)

    def _good_lines(self, path: Path) -> Iterator[ParsedOrder]:
        for line in read_orders(path):
            match line:
                case BadLine():
                    self._skip(line)
                case ParsedOrder(number=number) if number in self._seen:
                    first = self._seen[number]
                    self._skip(BadLine(line.line, f"order {number} is already on line {first}"))
                case ParsedOrder():
                    self._seen[line.number] = line.line
                    yield line

    def _skip(self, bad_line: BadLine) -> None:
        self.skipped += 1
        self.report_bad_line(bad_line)

    def _insert(self, batch: Sequence[ParsedOrder]) -> Iterator[BadLine]:
        """Insert the batch and yield the lines that the database refuses.

        One refused line rolls back its savepoint, so the batch is halved until that line is alone.
        """
        try:
            with transaction.atomic():
                loaded = self._insert_new(batch)
        except (DataError, IntegrityError) as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                yield from self._insert(batch[:middle])
                yield from self._insert(batch[middle:])
            else:
                reason = str(error).strip().split("\n")[0]
                yield BadLine(batch[0].line, f"the database refused it: {reason}")
        else:
            self.loaded += loaded
            self.already_there += len(batch) - loaded

    def _insert_new(self, batch: Sequence[ParsedOrder]) -> int:
        numbers = [parsed.number for parsed in batch]
        known = set(
            Order.objects.filter(number__in=numbers).order_by().values_list("number", flat=True)
        )
        new = [parsed for parsed in batch if parsed.number not in known]
        customers = _customers(new)
        orders = Order.objects.bulk_create(
            _order(parsed, customers[parsed.customer_code]) for parsed in new
        )
        if self.lines_of:
            OrderLine.objects.bulk_create(line for order in orders for line in self.lines_of(order))
        add_paperwork(Order.objects.filter(number__in=[parsed.number for parsed in new]))
        return len(orders)


def _customers(batch: Sequence[ParsedOrder]) -> dict[str, Customer]:
    # The first mention of a customer wins, and one already in the database is left alone.
    first = {parsed.customer_code: parsed for parsed in sorted(batch, key=_line, reverse=True)}
    known = Customer.objects.in_bulk(list(first), field_name="code")
    new = [_customer(first[code]) for code in sorted(first.keys() - known.keys())]
    return known | {customer.code: customer for customer in Customer.objects.bulk_create(new)}


def _line(parsed: ParsedOrder) -> int:
    return parsed.line


def _customer(parsed: ParsedOrder) -> Customer:
    return Customer(
        code=parsed.customer_code,
        company=parsed.company,
        contact_name=parsed.contact_name,
        # A domain that RFC 2606 reserves, so that no mail of a sample reaches a person.
        email=f"{parsed.customer_code.lower()}@example.com",
    )


def _order(parsed: ParsedOrder, customer: Customer) -> Order:
    shipped = parsed.shipped_date
    return Order(
        number=parsed.number,
        customer=customer,
        order_date=parsed.order_date,
        required_date=parsed.required_date,
        shipped_at=timezone.make_aware(datetime.combine(shipped, time())) if shipped else None,
        freight=parsed.freight,
        ship_city=parsed.ship_city,
        ship_country=parsed.ship_country,
    )
