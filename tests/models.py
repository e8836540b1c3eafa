"""Tables of every kind that a pending queryset may be built on."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.utils import timezone

from dcl_processor.columns import LeaseColumn, RetryColumns


class Depot(models.Model):
    name = models.CharField(max_length=50)
    open = models.BooleanField(default=True)


class Tag(models.Model):
    name = models.CharField(max_length=50)


class Parcel(LeaseColumn):
    """The plain case: a flag in the row itself."""

    depot = models.ForeignKey(Depot, models.CASCADE, null=True, related_name="parcels")
    tags = models.ManyToManyField(Tag, related_name="parcels")
    sent = models.BooleanField(default=False)
    tries = models.IntegerField(default=0)
    weight = models.IntegerField(null=True)
    priority = models.IntegerField(default=0)
    note = models.CharField(max_length=200, default="")
    sent_at = models.DateTimeField(null=True)
    code = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001  # unique or none


class QuietParcel(Parcel):
    """A proxy."""

    class Meta:
        proxy = True


class Scan(models.Model):
    parcel = models.ForeignKey(Parcel, models.CASCADE, related_name="scans")
    ok = models.BooleanField(default=True)


class Receipt(models.Model):
    """Holds the flag of a parcel beside it."""

    parcel = models.OneToOneField(Parcel, models.CASCADE, related_name="receipt")
    printed = models.BooleanField(default=False)


class Letter(LeaseColumn):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    sent = models.BooleanField(default=False)


class Seat(LeaseColumn):
    pk = models.CompositePrimaryKey("row", "number")
    row = models.IntegerField()
    number = models.IntegerField()
    sent = models.BooleanField(default=False)


class Vehicle(LeaseColumn):
    """The parent of a multi-table family, which holds the flag."""

    inspected = models.BooleanField(default=False)
    plate = models.CharField(max_length=20, default="")


class Truck(Vehicle):
    load = models.IntegerField(default=0)
    weighed = models.BooleanField(default=False)


class Trailer(Vehicle):
    """A child whose primary key is not its parent's."""

    serial = models.BigAutoField(primary_key=True)
    vehicle = models.OneToOneField(Vehicle, models.CASCADE, parent_link=True)
    axles = models.IntegerField(default=2)


class RoadTrain(Truck):
    """A grandchild."""

    length = models.IntegerField(default=0)


class VisibleManager(models.Manager["Crate"]):
    def get_queryset(self) -> models.QuerySet[Crate]:
        return super().get_queryset().filter(hidden=False)


class Crate(LeaseColumn):
    """Its default and base managers hide rows; ``visible`` is the one that users write."""

    hidden = models.BooleanField(default=False)
    sent = models.BooleanField(default=False)

    visible: ClassVar[VisibleManager] = VisibleManager()

    class Meta:
        base_manager_name = "visible"


class Priced(LeaseColumn):
    """Ordered by default, and with a generated column."""

    net = models.IntegerField(default=1)
    gross = models.GeneratedField(
        expression=models.F("net") * 2, output_field=models.IntegerField(), db_persist=True
    )
    sent = models.BooleanField(default=False)

    class Meta:
        ordering = ("-net",)


class Message(LeaseColumn):
    """Its flag is a key of a document."""

    data = models.JSONField(default=dict)


class Voucher(LeaseColumn):
    """A key of letters, which says nothing of when a row came."""

    code = models.CharField(max_length=20, primary_key=True)
    sent = models.BooleanField(default=False)


class Badge(LeaseColumn):
    """Its primary key is that of another row, and the columns before it are not the key."""

    printed = models.BooleanField(default=False)
    double = models.GeneratedField(
        expression=models.F("size") * 2, output_field=models.IntegerField(), db_persist=True
    )
    size = models.IntegerField(default=1)
    parcel = models.OneToOneField(Parcel, models.CASCADE, primary_key=True)


class Watched(LeaseColumn):
    """Remembers how it was loaded, as models that look for changes do."""

    state = models.CharField(max_length=20, default="new")
    note = models.CharField(max_length=200, default="")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.loaded = (self.state, self.note)


class OpenParcel(models.Model):
    """A view that looks like a table: parcels whose depot is open."""

    depot_id = models.BigIntegerField(null=True)
    sent = models.BooleanField()
    note = models.CharField(max_length=200)

    class Meta:
        managed = False
        db_table = "tests_openparcel"


class Visit(LeaseColumn):
    """Its order is that of the rows it points to."""

    depot = models.ForeignKey(Depot, models.CASCADE, null=True)
    at = models.IntegerField(default=0)
    done = models.BooleanField(default=False)

    class Meta:
        ordering = ("depot__name", "-at")

    @property
    def place(self) -> tuple[str, int]:
        return (self.depot.name if self.depot else "", self.at)


class Colour(models.TextChoices):
    RED = "red", "Red"
    BLUE = "blue", "Blue"


class Shouted(str):
    """A value of its own class, which shows that it is one."""

    __slots__ = ()


class ShoutedField(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Keeps letters small and gives them back large, as fields with a converter do."""

    def get_prep_value(self, value: object) -> object:
        return None if value is None else str(value).lower()

    def from_db_value(self, value: str | None, *_: object) -> Shouted | None:
        return None if value is None else Shouted(value.upper())


class Sample(LeaseColumn):
    """A column of nearly every type."""

    done = models.BooleanField(null=True, default=False)
    price = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    day = models.DateField(null=True)
    hour = models.TimeField(null=True)
    span = models.DurationField(null=True)
    colour = models.CharField(max_length=10, choices=Colour, default=Colour.RED)
    word = ShoutedField(max_length=20, null=True)
    token = models.UUIDField(null=True)
    ratio = models.FloatField(null=True)
    data = models.JSONField(null=True)
    raw = models.BinaryField(null=True)
    address = models.GenericIPAddressField(null=True)
    depot = models.ForeignKey(Depot, models.CASCADE, null=True, related_name="samples")
    other = models.ForeignKey(Depot, models.CASCADE, null=True, related_name="others")


class Errand(RetryColumns, LeaseColumn):
    """A row with everything that a delivery may want to write."""

    place = models.IntegerField(default=0)
    done = models.BooleanField(default=False)
    dead = models.BooleanField(default=False)
    claimed = models.BooleanField(default=False)
    claimed_at = models.DateTimeField(null=True)
    result = models.CharField(max_length=50, default="")
    code = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001  # unique or none


class Call(RetryColumns, LeaseColumn):
    """A row of a key, which may be NULL, with a place in the key's order."""

    depot = models.ForeignKey(Depot, models.CASCADE, null=True)
    place = models.IntegerField(default=0)
    status = models.CharField(max_length=10, default="new")
    claimed_at = models.DateTimeField(null=True)


class Misfit(models.Model):
    """Columns that look like what retries, leases and claims need, and are not."""

    done = models.BooleanField(default=False)
    never_null = models.DateTimeField(default=timezone.now)
    day = models.DateField(null=True)
    attempts = models.IntegerField(null=True)
    next_attempt_at = models.DateTimeField(null=True)
    last_error = models.TextField(default="")
    words = models.CharField(max_length=20, default="")


class Dispatch(LeaseColumn):
    """A row with the retry columns that a project had before, and with too few of some kinds."""

    place = models.IntegerField(default=0)
    status = models.CharField(max_length=20, default="queued")
    tries = models.PositiveSmallIntegerField(null=True)
    not_before = models.DateTimeField(null=True)
    claimed_at = models.DateTimeField(null=True)
