"""The tables that are asked, their words, and how rows of many kinds get into them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from django.db.models import Model, QuerySet

from tests import models as tables
from tests.fuzz.words import VALUES, meaning


@dataclass(frozen=True, repr=False)
class World:
    """A model with what may be said of it. Kinds are those of ``VALUES``; "?": nullable."""

    #: Where questions begin, such as ``Parcel.objects``.
    source: str
    own: Mapping[str, str]
    across: Mapping[str, str] = field(default_factory=dict)
    #: Names that lead to many.
    many: Sequence[str] = ()
    #: Names that lead to one.
    one: Sequence[str] = ()
    #: What a subquery may ask beside the row: model, name of the key to it, one column of it.
    beside: Sequence[tuple[str, str, str, str]] = ()
    key: Callable[[int], dict[str, Any]] = lambda _: {}
    around: Callable[[Any, Random], None] = lambda _row, _random: None

    def __repr__(self) -> str:
        return f"the world of {self.source}"

    @property
    def name(self) -> str:
        return self.source.partition(".")[0]

    @property
    def model(self) -> type[Model]:
        model: type[Model] = getattr(tables, self.name)
        return model._meta.concrete_model or model

    def make(self, number: int, seed: int, given: Mapping[str, Any]) -> Any:
        """Make one row; ``given``: columns that are the same however the dice fall."""
        random = Random(seed)  # noqa: S311  # no secret
        values = {name: _thrown(kind, random) for name, kind in self.own.items()}
        row: Any = QuerySet[Any](self.model).create(**self.key(number), **{**values, **given})
        self.around(row, random)
        return row


def _thrown(kind: str, random: Random) -> Any:
    texts = VALUES[kind.rstrip("?")]
    return meaning(random.choice([*texts, "None"] if kind.endswith("?") else texts))


def _depot(random: Random) -> Any:
    name, is_open = random.choice("ab"), random.choice([True, False])
    found = tables.Depot.objects.filter(name=name).first()
    return found or tables.Depot.objects.create(name=name, open=is_open)


def _around_parcel(row: Any, random: Random) -> None:
    if random.random() < 0.7:
        QuerySet(tables.Parcel).filter(pk=row.pk).update(depot=_depot(random))
    for _ in range(random.randrange(3)):
        tables.Scan.objects.create(parcel_id=row.pk, ok=random.choice([True, False]))
    for name in "ab":
        if random.random() < 0.5:
            row.tags.add(tables.Tag.objects.get_or_create(name=name)[0])
    if random.random() < 0.6:
        tables.Receipt.objects.create(parcel_id=row.pk, printed=random.choice([True, False]))


def _around_visit(row: Any, random: Random) -> None:
    if random.random() < 0.7:
        type(row).objects.filter(pk=row.pk).update(depot=_depot(random))


def _new_parcel(number: int) -> dict[str, Any]:
    depot = tables.Depot.objects.create(name="ab"[number % 2], open=number % 3 > 0)
    return {"parcel": tables.Parcel.objects.create(depot=depot, tries=number)}


PARCEL: dict[str, str] = {
    "sent": "bool",
    "tries": "int",
    "weight": "int?",
    "priority": "int",
    "note": "text",
    "sent_at": "time?",
}
AROUND_PARCEL: dict[str, Any] = {
    "across": {
        "depot__open": "bool",
        "depot__name": "text",
        "scans__ok": "bool",
        "tags__name": "text",
        "receipt__printed": "bool",
    },
    "many": ("scans", "tags"),
    "one": ("depot", "receipt"),
    "beside": (
        ("Scan", "parcel", "ok", "bool"),
        ("Receipt", "parcel", "printed", "bool"),
        ("Depot", "parcels", "open", "bool"),
    ),
    "around": _around_parcel,
}
WORKER: dict[str, str] = {"done": "bool", "claimed": "bool", "dead": "bool", "result": "text"}
VEHICLE: dict[str, str] = {"inspected": "bool", "plate": "text"}
DEPOT: dict[str, Any] = {
    "across": {"depot__open": "bool", "depot__name": "text"},
    "one": ("depot",),
    "around": _around_visit,
}

WORLDS = (
    World("Parcel.objects", PARCEL, **AROUND_PARCEL),
    World("QuietParcel.objects", PARCEL, **AROUND_PARCEL),
    World("Parcel.objects.using('other')", PARCEL, **AROUND_PARCEL),
    World("Letter.objects", {"sent": "bool"}, key=lambda n: {"id": uuid.UUID(int=n * 7919)}),
    World("Voucher.objects", {"sent": "bool"}, key=lambda n: {"code": f"{'zay'[n % 3]}%{n}"}),
    World("Seat.objects", {"sent": "bool"}, key=lambda n: {"row": n % 2, "number": n}),
    World("Vehicle.objects", VEHICLE, beside=(("Truck", "vehicle_ptr", "weighed", "bool"),)),
    World("Crate.visible", {"sent": "bool", "hidden": "bool"}),
    World("Priced.objects", {"sent": "bool", "net": "int"}),
    World("Message.objects", {"data": "json"}),
    World("Errand.objects", {**WORKER, "place": "int"}),
    World(
        "Badge.objects",
        {"printed": "bool", "size": "int"},
        {"parcel__sent": "bool", "parcel__depot__open": "bool", "parcel__scans__ok": "bool"},
        one=("parcel", "parcel__depot"),
        key=_new_parcel,
    ),
    World("Visit.objects", {"done": "bool", "at": "int"}, **DEPOT),
    World("Watched.objects", {"state": "text", "note": "text"}),
    World(
        "Sample.objects",
        {
            "done": "bool?",
            "price": "decimal?",
            "day": "date?",
            "hour": "hour?",
            "span": "span?",
            "colour": "colour",
            "word": "word?",
            "token": "uuid?",
            "ratio": "float?",
            "data": "json?",
            "raw": "bytes?",
            "address": "address?",
        },
        **DEPOT,
    ),
)

#: In the order in which rows may be deleted.
EMPTIED: tuple[type[Model], ...] = (
    tables.Scan,
    tables.Receipt,
    tables.Badge,
    tables.Parcel,
    tables.Tag,
    tables.Visit,
    tables.Sample,
    tables.Depot,
    tables.Letter,
    tables.Voucher,
    tables.Seat,
    tables.Truck,
    tables.Vehicle,
    tables.Crate,
    tables.Priced,
    tables.Message,
    tables.Errand,
    tables.Watched,
)


def empty() -> None:
    """Delete what the last example left, whatever a manager hides."""
    tables.Parcel.tags.through._default_manager.all().delete()
    for model in EMPTIED:
        rows = QuerySet[Any](model)
        rows._raw_delete(rows.db) if not model._meta.parents else rows.delete()
