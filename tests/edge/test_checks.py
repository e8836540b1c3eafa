"""Each check, seen to fire and seen to stay silent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.core.checks import CheckMessage, run_checks
from django.db import connection
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.checks import check_found
from dcl_processor.operator.registry import Found
from tests.databases import alias
from tests.edge.manage import Install, python
from tests.models import Depot, Errand, Parcel, Scan, Trailer

Pending = QuerySet[Any] | Callable[[], QuerySet[Any]]


def unsent() -> QuerySet[Parcel]:
    return Parcel.objects.filter(sent=False)


def processor(pending: Any = unsent, done: Any = None, **options: Any) -> BatchProcessor[Any]:
    @batch_processor(pending=pending, done=done, **options)
    def handle(row: Any) -> None:
        raise AssertionError("no check calls a handler")

    return handle


def messages(*processors: BatchProcessor[Any]) -> list[CheckMessage]:
    return check_found([Found(each, "tests.processors.handle") for each in processors])


def ids(*processors: BatchProcessor[Any]) -> list[str]:
    # What is said of a lease without retry has its own test.
    found = [str(each.id).removeprefix("dcl_processor.") for each in messages(*processors)]
    return [each for each in found if each != "W012"]


# --- one processor and its columns


def priced() -> QuerySet[Any]:
    return apps.get_model("tests", "Priced")._default_manager.filter(sent=False)


SENT = {"sent": True}
MARK_MANY: dict[str, Any] = {"delivery": Delivery.AT_MOST_ONCE, "claim": {"tries": "many"}}
ODD_COUNT = Retry(attempts="weigth", next_attempt_at=None, last_error=None)
SHARED = "pending tests tests.{} across a foreign key"


@pytest.mark.parametrize(
    ("check", "pending", "options", "words"),
    [
        ("E001", lambda: unsent()[:10], {"done": SENT}, "got a slice"),
        ("E001", lambda: unsent().values("pk"), {"done": SENT}, "got values()"),
        ("E001", list, {"done": SENT}, "of type list"),
        ("E001", lambda: unsent().union(unsent()), {"done": SENT}, "got a union()"),
        ("E001", lambda: Parcel.objects.filter(Q(snet=False)), {"done": SENT}, "keyword 'snet'"),
        ("E001", lambda: 1 // 0, {"done": SENT}, "ZeroDivisionError"),
        ("E002", unsent, {"done": {"snet": True}}, "got 'snet'"),
        ("E002", unsent, {"done": {"id": 0}}, "the primary key"),
        ("E002", unsent, {"done": {"scans": None}}, "got 'scans'"),
        ("E002", priced, {"done": {"gross": 4}}, "generated"),
        ("E004", unsent, {"done": {"sent": "maybe"}}, "must be either True or False"),
        ("E004", unsent, {"done": {"sent_at": "yesterday"}}, "format"),
        ("E004", unsent, {"done": {"sent": None}}, "NOT NULL"),
        ("E004", unsent, {"done": {"depot_id": "north"}}, "must be an integer"),
        ("E004", unsent, {"done": {"note": "x" * 201}}, "at most 200 characters (it has 201)"),
        # The other flips are checked as this one is.
        ("E004", unsent, {"done": SENT, "failed": {"tries": "many"}}, "expected failed to give"),
        ("W002", unsent, {"done": SENT, "failed": {"sent_at": timezone.now()}}, "failed writes 20"),
        ("E004", unsent, {"done": SENT, "reset": {"tries": "many"}}, "expected reset to give"),
        ("E004", unsent, {"done": SENT, **MARK_MANY}, "expected claim to give"),
        # A column that it keeps for itself.
        ("E009", unsent, {"done": SENT, "retry": ODD_COUNT}, "Retry's attempts='weigth' to"),
        # A flag that several rows share.
        ("W001", lambda: Parcel.objects.filter(depot__open=True), {}, SHARED.format("Depot")),
        ("W001", lambda: Parcel.objects.exclude(depot__open=False), {}, SHARED.format("Depot")),
        (
            "W001",
            lambda: unsent().filter(Q(depot__open=True) | Q(weight=None)),
            {},
            SHARED.format("Depot"),
        ),
        ("W001", lambda: Parcel.objects.filter(tags__name="fragile"), {}, SHARED.format("Tag")),
        ("W001", lambda: Scan.objects.filter(parcel__depot__open=True), {}, SHARED.format("Depot")),
        ("W001", lambda: Scan.objects.filter(parcel__sent=False), {}, SHARED.format("Parcel")),
    ],
)
def test_what_is_wrong_is_one_message_that_names_it(
    check: str, pending: Any, options: dict[str, Any], words: str
) -> None:
    (message,) = messages(processor(pending, **options))
    assert message.id == f"dcl_processor.{check}"
    assert words in message.msg
    assert str(message).startswith("tests.handle: ")


@pytest.mark.parametrize(
    ("pending", "done"),
    [
        (unsent, None),
        (lambda: unsent().filter(sent_at__lt=timezone.now(), depot__open=True), SENT),
        # Values that fit their columns.
        (unsent, {"note": "x" * 200}),
        (unsent, {"sent": "True", "tries": "3", "sent_at": "2024-05-01T12:00Z"}),
        (unsent, {"depot": Depot(pk=3)}),
        (unsent, {"depot_id": 3, "weight": None, "tries": F("tries") + 1}),
        # A flag in the row, which a run proves before the first handler; a key that is a column.
        (lambda: unsent().filter(depot__open=True), lambda row, result: {"sent": result}),
        (lambda: Parcel.objects.filter(depot_id=3), None),
        (lambda: Parcel.objects.filter(depot=None), None),
        # A flag in what no other row shares.
        (lambda: Parcel.objects.filter(receipt__printed=False), None),
        (lambda: Parcel.objects.filter(scans__ok=False), None),
        (lambda: Trailer.objects.filter(inspected=False), None),
        (lambda: Parcel.objects.filter(Exists(Scan.objects.filter(parcel=OuterRef("pk")))), None),
        # A time that is asked for at each flip, or was written down.
        (unsent, {"sent_at": timezone.now}),
        (unsent, {"sent_at": Now()}),
        (unsent, {"sent_at": datetime(2024, 5, 1, tzinfo=UTC)}),
        (unsent, {"sent_at": datetime.max.replace(tzinfo=UTC)}),
    ],
)
def test_what_is_right_is_passed_in_silence(pending: Pending, done: Any) -> None:
    assert ids(processor(pending, done)) == []


@pytest.mark.django_db
def test_a_pending_that_asks_a_table_that_is_not_there_yet_is_no_finding() -> None:
    """Django checks before it migrates."""

    def asks() -> QuerySet[Parcel]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM no_such_table")
        return unsent()

    assert ids(processor(asks, {"sent": True})) == []


# --- W002, W003: times frozen at import


@pytest.mark.parametrize("ago", [timedelta(0), timedelta(days=30)])
def test_a_time_read_at_import_is_a_warning(ago: timedelta) -> None:
    read = timezone.now().replace(microsecond=1) - ago
    assert ids(processor(done={"sent_at": read})) == ["W002"]
    assert ids(processor(Parcel.objects.filter(sent_at__lt=read), {"sent_at": None})) == ["W003"]


def test_a_frozen_time_is_found_wherever_it_stands_in_pending() -> None:
    now = timezone.now()
    scans = Scan.objects.filter(parcel__sent_at__lt=now)
    for rows in (
        unsent().filter(Q(weight=1) | ~Q(sent_at__range=(now, now))),
        unsent().filter(Exists(scans.filter(parcel=OuterRef("pk")))),
        unsent().filter(pk__in=scans.values("parcel")),
        unsent().annotate(age=now - F("sent_at")),
    ):
        assert ids(processor(rows, {"sent": True})) == ["W003"]


# --- E005, E008: what the modules hold


def found_in(app: str) -> list[str]:
    configs = [apps.get_app_config(app)]
    return [str(message) for message in run_checks(app_configs=configs, tags=["processors"])]


def test_two_processors_of_one_name_are_an_error(install: Install) -> None:
    two = """
    class Sort(BatchProcessor):
        def pending(self): return Parcel.objects.filter(sent=False)
        def process(self, row): pass
    sort = Sort()
    """
    install("post", two + "resort = Sort()")
    (message,) = found_in("post")
    assert "E005" in message
    assert "post.processors.sort and post.processors.resort" in message


def test_a_definition_that_is_refused_is_an_error(install: Install) -> None:
    """And not a traceback in the middle of manage.py check."""
    install(
        "post",
        """
    @batch_processor(pending=lambda: Parcel.objects.all(), done={})
    def send(parcel): pass
    """,
    )
    (message,) = found_in("post")
    assert message.startswith("post: (dcl_processor.E008) expected post.processors to be imported")
    assert "send: expected done to name" in message


# --- E006, E014: databases


def test_an_alias_that_does_not_exist_is_an_error() -> None:
    (message,) = messages(processor(done={"sent": True}, using="nowhere"))
    assert message.id == "dcl_processor.E006"
    assert "expected using to be one of the databases default, other" in message.msg
    assert ids(processor(done={"sent": True}, using="other")) == []


@pytest.mark.parametrize(
    "options", [{"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}, {"group_by": "depot"}]
)
def test_no_other_check_asks_an_alias_that_does_not_exist(options: dict[str, Any]) -> None:
    assert ids(processor(done={"sent": True}, using="nowhere", **options)) == ["E006"]


@pytest.mark.parametrize(("size", "found"), [(2, ["E014"]), (3, [])])
def test_a_pool_without_room_for_each_thread_of_a_run_is_an_error(
    size: int, found: list[str]
) -> None:
    """The run, the thread in which async handlers query, and the heartbeat."""

    async def handle(row: Errand) -> None: ...

    with alias("pooled", OPTIONS={"pool": {"max_size": size}}):
        run = batch_processor(
            pending=Errand.objects.filter(done=False), done={"done": True}, using="pooled", **LEASE
        )(handle)
        assert ids(run) == found
    assert ids(errand("plain", **LEASE)) == []


# --- the command


def test_manage_py_check_finds_them_without_a_database() -> None:
    """The server that is named here does not exist.

    Only these checks are run: Django's own ask it, from 6.1, about a model of the tests.
    """
    nowhere = "postgres://nobody@127.0.0.1:1/nowhere"
    check = ("-m", "django", "check", "--tag", "processors")
    sound = python(*check, DATABASE_URL=nowhere)
    assert (sound.returncode, sound.stderr) == (0, "")
    settings = "tests.faulty.settings"
    faulty = python(*check, DATABASE_URL=nowhere, DJANGO_SETTINGS_MODULE=settings)
    assert faulty.returncode == 1
    assert "faulty.slice_off: (dcl_processor.E001) expected pending to be a" in faulty.stderr
    assert "Traceback" not in faulty.stderr


# --- E010: what each processor needs for itself


def errand(name: str, pending: Any = None, **options: Any) -> BatchProcessor[Any]:
    def handle(row: Any) -> None: ...

    asked = Errand.objects.filter(done=False) if pending is None else pending
    given = {"pending": asked, "done": {"done": True}, **options}
    return batch_processor(name=name, **given)(handle)


LEASE: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIM: dict[str, Any] = {"delivery": Delivery.AT_MOST_ONCE, "claim": {"result": "sending"}}
RETRY: dict[str, Any] = {"retry": Retry()}
OWN_COLUMNS = Retry(attempts="place", next_attempt_at="claimed_at")
SINCE = {**CLAIM, "claimed_at": "claimed_at"}
NEW, PACKED = Errand.objects.filter(result="new"), Errand.objects.filter(result="packed")


def tried(pending: Any, result: str) -> dict[str, Any]:
    return {"retry": Retry(), "pending": pending, "done": {"result": result}}


def marked(before: str, mark: str, after: str) -> dict[str, Any]:
    """Return a stage whose marked rows stay in pending."""
    at_work = Q(result=mark, leased_until__isnull=False)
    rows = {"pending": Errand.objects.filter(Q(result=before) | at_work), "done": {"result": after}}
    return {**LEASE, **rows, "claim": {"result": mark}, "reset": {"result": before}}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (RETRY, RETRY, "attempts and next_attempt_at of tests.Errand"),
        (RETRY, {"retry": Retry(attempts="place")}, "got next_attempt_at of tests.Errand"),
        (LEASE, LEASE, "got leased_until of tests.Errand"),
        (LEASE, {"retry": Retry(next_attempt_at="leased_until")}, "got leased_until"),
        (SINCE, {**SINCE, "claim": {"result": "b"}}, "got claimed_at of tests.Errand"),
        (CLAIM, CLAIM, "got claim={'result': 'sending'} of"),
        # Nothing is shared.
        (RETRY, {}, ""),
        (RETRY, {"retry": OWN_COLUMNS}, ""),
        (LEASE, RETRY, ""),
        (CLAIM, {**CLAIM, "claim": {"result": "packing"}}, ""),
        # Stages of a pipeline: both ask for one column, and write different values to it.
        (tried(NEW, "packed"), tried(PACKED, "sent"), ""),
        (tried(NEW, "packed"), tried(PACKED.filter(Q(done=False) | Q(dead=False)), "sent"), ""),
        (marked("new", "busy", "old"), marked("old", "at it", "sent"), ""),
        # Otherwise they are not, nor are claims told apart by stages.
        (tried(NEW, "packed"), tried(PACKED, "packed"), "attempts"),
        (tried(NEW, "packed"), tried(Errand.objects.filter(place=3), "sent"), "attempts"),
        ({**CLAIM, "pending": NEW}, {**CLAIM, "pending": PACKED}, "claim="),
        # Each would take over the other's rows.
        (marked("new", "busy", "old"), marked("old", "busy", "sent"), "got claim="),
    ],
)
def test_e010_two_processors_that_share_columns_are_both_named(
    one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    both = messages(errand("a", **one), errand("b", **other))
    found = [each for each in both if each.id == "dcl_processor.E010"]
    assert len(found) == bool(words)
    for message in found:
        assert message.obj == "b"
        assert "shared with a: " in message.msg
        assert words in message.msg
        assert "silence dcl_processor.E010" in str(message.hint)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({}, {}, ["W011"]),
        ({}, {"pending": Errand.objects.filter(place=3, done=False)}, ["W011"]),
        # One of them tests another column, or writes another value.
        ({"pending": Errand.objects.filter(dead=False)}, {}, []),
        ({}, {"pending": Errand.objects.filter(done=True), "done": {"done": False}}, []),
    ],
)
def test_w011_two_processors_that_take_each_others_rows_are_both_named(
    one: dict[str, Any], other: dict[str, Any], found: list[str]
) -> None:
    both = errand("a", **one), errand("b", **other)
    assert ids(*both) == found
    for message in messages(*both):
        assert message.msg.startswith("expected b and a to handle different rows, got two")


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [(LEASE, True), ({**LEASE, "retry": Retry()}, False), (CLAIM, False), ({}, False)],
)
def test_w012_a_handler_that_cannot_tell_a_takeover(
    options: dict[str, Any], is_warned: bool
) -> None:
    found = [each for each in messages(errand("a", **options)) if each.id == "dcl_processor.W012"]
    assert [each.obj for each in found] == ["a"] * is_warned
    assert all("row.attempts is above 1" in str(each.hint) for each in found)


@pytest.mark.parametrize("key", ["nothing", "claimed_at"])
def test_a_key_that_is_no_column_or_none_of_keys_is_an_error(key: str) -> None:
    assert ids(errand("plain", group_by=key)) == ["E015"]
    assert ids(errand("plain", fair_by=key)) == ["E015"]


@pytest.mark.parametrize("order", ["?", "depot", "depot__name", F("weight").asc()])
def test_an_order_that_is_not_by_own_columns_is_an_error(order: Any) -> None:
    pending = unsent().order_by(order)
    ordered = processor(pending, {"sent": True}, group_by="weight", in_order=True)
    assert ids(ordered) == ["E015"]
    named = unsent().order_by("-depot_id")
    assert ids(processor(named, {"sent": True}, group_by="depot", in_order=True)) == []
