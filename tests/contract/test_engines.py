"""Tables whose engine has no transactions, which MariaDB and MySQL have beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import CaptureQueriesContext, isolate_apps

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.checks import check_found
from dcl_processor.exceptions import Unsupported
from dcl_processor.registry import Found
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.models import Truck

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {},
    "at most once": {"delivery": "at_most_once"},
}


def questions(captured: CaptureQueriesContext) -> int:
    return sum("information_schema.ENGINES" in each["sql"] for each in captured.captured_queries)


def test_a_servers_engines_are_asked_about_once_per_table_and_connection() -> None:
    connection.close()
    pending = Truck.objects.filter(weighed=False)
    run = batch_processor(pending=pending, done={"weighed": True})(the.ignore)
    with CaptureQueriesContext(connection) as empty:
        assert_run(run())
    assert len(empty) == 1
    counts = []
    for _ in range(2):
        for _ in range(3):
            Truck.objects.create()
        with CaptureQueriesContext(connection) as captured:
            assert_run(run(), processed=3)
        counts.append(questions(captured))
    # A truck's and a vehicle's.
    assert counts == ([2, 0] if connection.vendor == "mysql" else [0, 0])


if connection.vendor == "mysql":

    @pytest.fixture
    def load() -> Iterator[type[models.Model]]:
        """Make a table and its parent's, which may have engines of their own."""
        with isolate_apps("tests"):

            class Load(models.Model):
                sent = models.BooleanField(default=False)

                class Meta:
                    app_label = "tests"

            class Bulky(Load):
                load_ptr = models.OneToOneField(
                    Load, models.CASCADE, parent_link=True, primary_key=True, db_constraint=False
                )
                tied = models.BooleanField(default=False)

                class Meta:
                    app_label = "tests"

            with connection.schema_editor() as editor:
                editor.create_model(Load)
                editor.create_model(Bulky)
            try:
                yield Bulky
            finally:
                with connection.schema_editor() as editor:
                    editor.delete_model(Bulky)
                    editor.delete_model(Load)

    def tying(model: Any, calls: list[Any], **options: Any) -> BatchProcessor[Any]:
        @batch_processor(pending=model.objects.filter(tied=False), done={"tied": True}, **options)
        def tie(row: Any) -> None:
            calls.append(row.pk)

        return tie

    @pytest.mark.parametrize("engine", ["MyISAM", "MEMORY", "Aria"])
    @pytest.mark.parametrize("part", ["load", "bulky"])
    @pytest.mark.parametrize("options", DELIVERIES.values(), ids=[*DELIVERIES])
    def test_a_table_without_transactions_is_refused(
        load: Any, engine: str, part: str, options: dict[str, Any]
    ) -> None:
        """Before the first handler, and before a flip is tried that could not be taken back."""
        for _ in range(3):
            load.objects.create()
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE tests_{part} ENGINE={engine}")
        calls: list[Any] = []
        run = tying(load, calls, **options)
        sentence = f"got tests_{part} with the engine {engine}, which locks no row"
        for _ in range(2):
            with pytest.raises(Unsupported, match=sentence):
                run(concurrency=2)
        assert calls == []
        assert load.objects.filter(sent=False, tied=False).count() == 3
        found = [Found(run, "tests.processors.tie")]
        assert check_found(found) == []
        [message] = check_found(found, ["default"])
        assert (message.id, sentence in message.msg) == ("dcl_processor.E012", True)

    def test_it_is_asked_again_once_it_was_converted(load: Any) -> None:
        for _ in range(3):
            load.objects.create()
        calls: list[Any] = []
        for engine in ("MyISAM", "InnoDB"):
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER TABLE tests_bulky ENGINE={engine}")
            if engine == "MyISAM":
                with pytest.raises(Unsupported):
                    tying(load, calls)()
        assert_run(tying(load, calls)(), processed=3)
        assert len(calls) == 3

    @pytest.mark.parametrize("options", DELIVERIES.values(), ids=[*DELIVERIES])
    def test_i26_a_connection_that_counts_changed_rows_is_refused(options: dict[str, Any]) -> None:
        """A handler that writes the flag itself would leave the flip nothing to change."""
        the.errands(2)
        calls: list[Any] = []
        run = the.transactional(lambda row: calls.append(row.pk), **options)
        words = "without FOUND_ROWS, with which a row that has these values already counts as not"
        with connected({"client_flag": 0}), pytest.raises(Unsupported, match=words):
            run()
        assert calls == []
