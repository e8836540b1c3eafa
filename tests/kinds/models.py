"""Models whose instances notice or refuse what Django's own let pass."""

from __future__ import annotations

from typing import Any

from dirtyfields import DirtyFieldsMixin
from django.db import models
from django_fsm import FSMField, can_proceed, transition
from model_utils import FieldTracker
from safedelete.models import SafeDeleteModel

from dcl_processor.columns import LeaseColumn, RetryColumns


class Kind(RetryColumns, LeaseColumn):
    place = models.IntegerField(default=0)
    state = models.CharField(max_length=50, default="open")
    claimed_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True

    def look(self) -> None:
        """Look at the row and save it, as a handler does that knows its model."""
        self.save()


class ReadsItself(Kind):
    """Reads every field while it is made: one that is deferred is loaded by making another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded = {each.attname: getattr(self, each.attname) for each in self._meta.fields}

    def look(self) -> None:
        assert self.loaded["state"] == self.state
        super().look()


class Protected(Kind):
    """Its state takes no assignment, only transitions."""

    state = FSMField(default="open", protected=True)

    @transition(field=state, source=["open", "running"], target="handled")
    def handle(self) -> None: ...

    def look(self) -> None:
        assert can_proceed(self.handle)
        super().look()


class Tracked(Kind):
    tracker = FieldTracker()

    def look(self) -> None:
        assert not self.tracker.changed()
        super().look()


class Dirty(DirtyFieldsMixin, Kind):  # type: ignore[misc]  # it ships no types
    def look(self) -> None:
        assert not self.is_dirty()
        super().look()


class SoftDeleted(SafeDeleteModel, Kind):
    """Its queryset adds a condition when it is executed."""


class Guarded(Kind):
    """Takes no attribute once it is loaded, and none at all that is no field."""

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Guarded:
        row: Guarded = super().from_db(*args, **kwargs)
        vars(row)["_is_loaded"] = True
        return row

    def __setattr__(self, name: str, value: Any) -> None:
        names = {"_state", *(each.attname for each in self._meta.concrete_fields)}
        if "_is_loaded" in vars(self) or name not in names:
            raise AttributeError(name)
        super().__setattr__(name, value)


class FromDb(Kind):
    """Keeps what was read, and expects every column."""

    read: dict[str, Any]

    @classmethod
    def from_db(cls, db: Any, field_names: Any, values: Any, **kwargs: Any) -> FromDb:
        assert [*field_names] == [each.attname for each in cls._meta.concrete_fields]
        row: FromDb = super().from_db(db, field_names, values, **kwargs)
        row.read = dict(zip(field_names, values, strict=True))
        return row

    def look(self) -> None:
        assert self.read["state"] == self.state
        super().look()


class NeverRefreshed(Kind):
    def refresh_from_db(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a refresh")


class OpenOnly(models.Manager["Hidden"]):
    def get_queryset(self) -> models.QuerySet[Hidden]:
        return super().get_queryset().filter(state__in=["open", "running"])


class Hidden(Kind):
    """Every manager hides it once it is done."""

    objects = OpenOnly()

    class Meta:
        base_manager_name = "objects"


class Contrary(Kind):
    """Is false, is equal to none, and has no text."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        raise TypeError(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise TypeError("no text")

    __repr__ = __str__


class Computed(Kind):
    """Its question is about a generated column."""

    is_over = models.GeneratedField(
        expression=models.Q(state__in=["done", "dead"]),  # type: ignore[arg-type]  # it may be
        output_field=models.BooleanField(),
        db_persist=True,
    )


class Typed(Kind):
    """Its columns get other types than its fields have."""

    code = models.CharField(max_length=50, primary_key=True)
    owner = models.CharField(max_length=50, default="")
    value = models.CharField(max_length=50, default="")

    objects: models.Manager[Typed] = models.Manager()

    def look(self) -> None:
        """Leave it alone: what is read is not what is written."""
