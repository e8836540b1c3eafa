"""Texts for which a database has no letters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection, connections

from tests.contract.support import core
from tests.contract.support.temporary import temporary
from tests.kinds.models import Plain

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def few_letters(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the alias of a database whose texts have no emoji."""
    if connection.vendor == "mysql":
        change = "ALTER TABLE kinds_plain MODIFY last_error {} NOT NULL"
        with temporary(
            change.format("text CHARACTER SET utf8mb3"),
            "DELETE FROM kinds_plain; " + change.format("longtext"),  # noqa: S608  # a constant
        ):
            yield "default"
        return
    other = connections["other"]
    name = f"{other.settings_dict['NAME']}_latin1"
    words = f"DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
    with temporary(f"CREATE {words}", f"DROP DATABASE {name}"), monkeypatch.context() as it:
        it.setitem(other.settings_dict, "NAME", name)
        with other.schema_editor() as editor:
            editor.create_model(Plain)
        yield "other"
        other.close()


@core.three_deliveries
@core.each_size
def test_i16_an_error_that_the_database_has_no_letters_for_is_recorded_in_plain_text(
    delivery: str, size: int, few_letters: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt counts, and no other row fails."""
    every = Plain.objects.using(few_letters)
    for place in range(core.NUMBER):
        every.create(place=place)

    def fail(row: Plain) -> None:
        if row.place == core.BAD:
            raise ValueError("café \N{GRINNING FACE}")

    tested = core.Core(every, delivery, size, core.STATES)
    tested.act = fail
    for attempt in (1, 2):
        report = tested.run()
        assert (report.failed, report.to_retry) == (1, 1)
        assert report.processed == (core.NUMBER - 1 if attempt == 1 else 0)
        [told] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert "was recorded with a plain text, because the database refused it" in told
        caplog.clear()
        [error] = every.filter(attempts=attempt).values_list("last_error", flat=True)
        assert error == "ValueError: caf? ?"
