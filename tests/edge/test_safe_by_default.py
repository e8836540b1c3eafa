"""What a first processor gets wrong is refused, or named, before it does harm."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, run_checks
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.test import override_settings
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, batch_processor, registry
from dcl_processor.checks import check_found
from dcl_processor.contrib.celery import run as task
from dcl_processor.exceptions import InvalidDone, InvalidOption, TooManyPending
from dcl_processor.operator_actions import doubts
from dcl_processor.registry import Found
from tests.edge.manage import Install, Manage
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)


def never(row: object) -> None:
    raise AssertionError("no handler is to be called")


def run(*arguments: str) -> tuple[str, str, str]:
    """Return what ``processors run`` wrote to stdout and stderr, and its error."""
    out, err, error = StringIO(), StringIO(), ""
    try:
        call_command("processors", "run", *arguments, stdout=out, stderr=err)
    except CommandError as raised:
        error = str(raised)
    return out.getvalue(), err.getvalue(), error


TWO = """
    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"id": 3})
    def twice(parcel):
        raise AssertionError("never called")

    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
    def send(parcel): ...
"""


@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--watch", "--max-rows", "1")])
def test_a_processor_that_its_checks_refuse_is_not_run_and_the_others_are(
    install: Install, arguments: tuple[str, ...]
) -> None:
    Parcel.objects.create()
    install("post", TWO)
    out, err, error = run("post.twice", "post.send", *arguments)
    assert err.startswith("post.twice: expected done to name columns that a flip may write, got")
    assert "which is the primary key. (dcl_processor.E002)\n" in err
    assert "post.twice did not run to the end" in error
    assert ("post.send: dry run: would try 1" if "--dry-run" in arguments else "1 processed") in out


def test_a_class_whose_init_forgets_super_costs_the_other_processors_nothing(
    install: Install, manage: Manage
) -> None:
    Parcel.objects.create()
    install(
        "post",
        """
    class Weigh(BatchProcessor):
        def __init__(self):
            self.scales = 1

        def pending(self):
            return Parcel.objects.filter(sent=False)

        def process(self, parcel): ...

    weigh = Weigh()

    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
    def send(parcel): ...
""",
    )
    words = "post.processors.weigh: expected Weigh.__init__() to call super().__init__()"
    assert words in manage("list").err
    out, err, error = run("--all")
    assert words in err
    assert "1 processed" in out
    assert error == "post.processors.weigh did not run to the end."
    assert [each.id for each in checks_of("post")] == ["dcl_processor.E020"]

    class Bare(BatchProcessor[Parcel]):
        def __init__(self) -> None:
            pass

    with pytest.raises(InvalidOption, match=r"expected Bare.__init__\(\) to call super\(\)"):
        Bare().run()


def checks_of(app: str) -> list[CheckMessage]:
    config = apps.get_app_config(app)
    return run_checks(app_configs=[config], tags=["processors"])


def test_what_no_command_would_find_is_a_warning(install: Install) -> None:
    install(
        "post",
        """
    from functools import wraps

    class Base(BatchProcessor):
        done = {"sent": True}

    class Weigh(Base):
        def pending(self):
            return Parcel.objects.filter(sent=False)

        def process(self, parcel): ...

    class Send(Weigh): ...

    send = Send()

    class Forgotten(Weigh): ...

    def logged(function):
        @wraps(function)
        def log(*arguments):
            return function(*arguments)
        return log

    @logged
    @batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
    def stamp(parcel): ...
""",
    )
    assert [(each.id, each.obj, each.hint) for each in checks_of("post")] == [
        ("dcl_processor.W010", "post.processors.Forgotten", "Write forgotten = Forgotten()."),
        (
            "dcl_processor.W010",
            "post.processors.stamp",
            "Write the other decorator below @batch_processor, so that it gets the function.",
        ),
    ]


@pytest.mark.parametrize(
    ("default", "done", "warned"),
    [(True, True, True), (False, True, False), (False, False, False), (None, True, False)],
)
def test_a_default_that_is_the_flip_is_a_warning(
    default: bool | None, done: bool, warned: bool
) -> None:
    """The migration of an old table needs it, and the model must not have it."""

    class Mail(models.Model):
        sent = models.BooleanField(default=default, null=True)

        class Meta:
            app_label = "tests"
            managed = False

    try:
        made: BatchProcessor[Mail] = batch_processor(
            pending=lambda: models.QuerySet(Mail).filter(sent=not done), done={"sent": done}
        )(never)
        found = [each.id for each in check_found([Found(made, "")])]
        assert ("dcl_processor.W009" in found) is warned
    finally:
        del apps.all_models["tests"]["mail"]
        apps.clear_cache()


def test_a_constant_that_names_no_row_is_refused_before_a_handler() -> None:
    """The database refuses it at the COMMIT alone, after each handler, in each run."""
    depot = Depot.objects.create(name="north")
    Parcel.objects.create()

    def filed(key: int) -> BatchProcessor[Parcel]:
        return batch_processor(
            pending=lambda: Parcel.objects.filter(depot=None), done={"depot_id": key}
        )(never if key != depot.pk else lambda row: None)

    with pytest.raises(InvalidDone, match=r"to name a row of tests\.Depot, got .*no such row"):
        filed(depot.pk + 1)()
    assert filed(depot.pk)().processed == 1


def test_without_max_pending_no_more_than_ten_thousand_rows_may_wait() -> None:
    """The first run after a migration would send a mail for each old order."""
    Depot.objects.bulk_create(Depot(open=True) for _ in range(10_001))
    close: BatchProcessor[Depot] = batch_processor(
        pending=lambda: Depot.objects.filter(open=True), done={"open": False}, batch_size=500
    )(lambda depot: None)
    with pytest.raises(TooManyPending, match=r"max_pending=10000 .*pass limit=… \(--limit\)"):
        close()
    assert close(limit=1).processed == 1
    assert close().processed == 10_000


#: An app with a processor of the same rows.
WAREHOUSE = "tests.warehouse"

CHARGE = """
    from dcl_processor import Delivery
    from tests.models import Errand

    @batch_processor(
        pending=lambda: Errand.objects.filter(done=False, claimed=False),
        delivery=Delivery.AT_MOST_ONCE,
        claim={"claimed": True},
        claimed_at="claimed_at",
        done={"done": True},
    )
    def charge(errand): ...
"""


@override_settings(INSTALLED_APPS=[each for each in settings.INSTALLED_APPS if each != WAREHOUSE])
def test_a_run_says_how_many_rows_are_in_doubt(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was killed in mid-charge: no run would mention the row any more."""
    install("bank", CHARGE)
    assert run("bank.charge", "--fail-in-doubt") == ("", "", "")
    since = timezone.now() - timedelta(minutes=5)
    Errand.objects.create(claimed=True, claimed_at=since)
    Errand.objects.create(claimed=True, claimed_at=timezone.now())  # its worker is at work
    out, err, error = run("bank.charge")
    assert (out, error) == ("", "")
    assert err.startswith("bank.charge: 1 row is in doubt: claimed over 60 s ago and never settled")
    assert run("bank.charge", "--fail-in-doubt")[2] == "1 row is in doubt."
    assert run("bank.charge", "--watch", "--max-runtime", "0.1")[1].count("1 row is in doubt") == 1
    charge = registry.processors()["bank.charge"]
    with monkeypatch.context() as broken:
        broken.setattr(charge, "pending", lambda: 1 / 0)
        assert doubts(charge) == (0, "")  # a run reports what it raises
    caplog.clear()
    task("bank.charge")
    assert ["1 row is in doubt" in line for line in caplog.messages] == [True]


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("asked", [{}, {"concurrency": 5}], ids=["option", "parameter"])
def test_in_a_test_case_handlers_run_one_by_one_however_concurrency_is_given(
    asked: Any,
) -> None:
    """It commits no rows, so that no other connection sees them."""
    Errand.objects.bulk_create([Errand(), Errand()])
    at_once: list[bool] = []
    handle: BatchProcessor[Errand] = batch_processor(
        pending=lambda: Errand.objects.filter(done=False),
        done={"done": True},
        delivery=Delivery.TRANSACTIONAL,
        concurrency=3,
    )(lambda row: at_once.append(connection.in_atomic_block))
    assert handle(**asked).processed == 2
    assert at_once == [True, True]
