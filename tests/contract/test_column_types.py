"""Columns that have another type than their fields, in each role that a column may have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections

from dcl_processor.engine.source import Source
from dcl_processor.exceptions import InvalidOption
from tests.contract.support import core
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.kinds.models import Typed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LABELS = ", ".join([f"'v{number}'" for number in range(20)])

#: By database: types, and how one spells a number.
TYPES: dict[str, dict[str, tuple[str, Callable[[int], str]]]] = {
    "postgresql": {
        "text": ("text", '"\\{}, }}'.format),
        "enum": ("tests_state", "v{}".format),
        "domain": ("tests_words", "v{}".format),
        "char": ("char(50)", "v{}".format),
        "jsonb": ("jsonb", '{{"a": {}}}'.format),
        "uuid": ("uuid", "00000000-0000-0000-0000-{:012}".format),
        "numeric": ("numeric(8, 2)", "{}".format),
        "range": ("int4range", "[{},100)".format),
        "inet": ("inet", "10.0.0.{}".format),
        "array": ("text[]", "{{v{}}}".format),
        "bytea": ("bytea", r"\x{:04x}".format),
    },
    "mysql": {
        "enum": (f"enum({LABELS})", "v{}".format),
        "json": ("json", '{{"a": {}}}'.format),
        "uuid": ("uuid", "00000000-0000-0000-0000-{:012}".format),
        "utf8mb3": ("varchar(50) CHARACTER SET utf8mb3", "é{}".format),
        "latin1": ("varchar(50) CHARACTER SET latin1", "é{}".format),
    },
    "sqlite": {},  # a column takes any value
}
HERE = TYPES[connection.vendor]
if "CITEXT" in os.environ:  # not with the embedded server
    HERE["citext"] = ("citext", "V{}".format)
#: Types of which no text finds a row again that was made of a value as it is read.
UNLIKE = {"array", "bytea"}
ROLES = {"state": "state", "value": "value", "key": "code"}
if connection.vendor == "postgresql":
    ROLES["key among others"] = "code"  # a claim names the keys in their order
CELLS = [
    (role, name)
    for role, column in ROLES.items()
    for name in HERE
    if not (column == "code" and name in {*UNLIKE, "json"})
]


@pytest.fixture(scope="module", autouse=True)
def types(django_db_setup: None, django_db_blocker: Any) -> None:
    """Make the types that PostgreSQL does not have, and drop an index on texts alone."""
    if connection.vendor == "postgresql":
        with django_db_blocker.unblock(), connection.cursor() as cursor:
            cursor.execute(f"CREATE TYPE tests_state AS ENUM ({LABELS})")
            if "citext" in HERE:
                cursor.execute("CREATE EXTENSION citext")
            cursor.execute(
                "CREATE DOMAIN tests_words AS text; DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX ' || "
                "indexname FROM pg_indexes WHERE indexname LIKE 'kinds_typed_code%like'); END $$"
            )


def of_type(column: str, kind: str, back: str = "varchar(50)") -> Any:
    """Let a column of the table have another type, with the rows that it has."""
    change, empty = "ALTER TABLE kinds_typed", "DELETE FROM kinds_typed"
    if connection.vendor == "mysql":
        words = f"{change} MODIFY {column} {{}} NOT NULL"
    else:
        words = f"{change} ALTER COLUMN {column} TYPE {{0}} USING {column}::text::{{0}}"
    return temporary(words.format(kind), f"{empty}; {words.format(back)}")


def rows_of(role: str, name: str = "") -> tuple[dict[str, str], Callable[[int], str]]:
    """Make rows that spell the column of a role as its type does; return their states."""
    _, spell = HERE.get(name, ("", "c{:02}".format))
    states = core.STATES
    if role == "state":
        states = {each: spell(number + 1) for number, each in enumerate(states)}
    for place in range(core.NUMBER):
        values = {"code": f"c{place:02}", "value": spell(1), "owner": spell(1)}
        if ROLES.get(role) == "code":
            values["code"] = spell(place + 1)
        Typed.objects.create(place=place, state=states["open"], **values)
    return states, spell


if HERE:

    @pytest.mark.parametrize(("role", "name"), CELLS)
    @core.three_deliveries
    @core.each_size
    def test_i19_a_column_may_have_another_type_than_its_field(
        role: str,
        name: str,
        delivery: str,
        size: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What cannot be found again as it is read is refused as a mark, before any handler."""
        states, spell = rows_of(role, name)
        options: dict[str, Any] = {}
        if role == "value":
            done = {"state": states["done"]}
            options["done"] = lambda row: {**done, "value": spell(row.place + 1)}
        elif role == "key among others":
            monkeypatch.setattr(Source, "_among_others", True)
        with of_type(ROLES[role], HERE[name][0]):
            tested = core.Core(Typed.objects.all(), delivery, size, states, **options)
            if role == "state" and delivery == "claim" and name in UNLIKE:
                with pytest.raises(InvalidOption, match="claim another value"):
                    tested.run()
                assert tested.calls == []
                return
            tested.check(caplog)
            if role == "value":
                assert Typed.objects.exclude(value=spell(1)).count() == core.NUMBER - 2


if connection.vendor == "postgresql":
    #: Columns of a processor's own bookkeeping; the type before, the type here.
    BOOKS = [
        ("attempts", "integer", "bigint"),
        ("attempts", "integer", "smallint"),
        ("attempts", "integer", "numeric(4)"),
        ("next_attempt_at", "timestamptz", "timestamp"),
        ("last_error", "text", "char(50)"),
        ("last_error", "text", "tests_words"),
    ]

    @pytest.mark.parametrize(("column", "before", "kind"), BOOKS)
    @core.three_deliveries
    @core.each_size
    def test_columns_of_retries_may_have_another_type(
        column: str,
        before: str,
        kind: str,
        delivery: str,
        size: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        states, _ = rows_of("")
        with of_type(column, kind, before):
            core.Core(Typed.objects.all(), delivery, size, states).check(caplog)

    @pytest.mark.parametrize(
        ("column", "delivery"), [("leased_until", "lease"), ("claimed_at", "claim")]
    )
    def test_a_time_without_a_zone_is_refused_for_that(column: str, delivery: str) -> None:
        states, _ = rows_of("")
        with of_type(column, "timestamp", "timestamptz"):
            tested = core.Core(Typed.objects.all(), delivery, 1, states)
            with pytest.raises(InvalidOption, match=r"to keep the time zone, .* with a time zone"):
                tested.run()
        assert tested.calls == []


if HERE:

    @pytest.fixture
    def few_letters(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """Give the alias of a database whose texts have no emoji."""
        if connection.vendor == "mysql":
            with of_type("last_error", "text CHARACTER SET utf8mb3", "longtext"):
                yield "default"
        else:
            other = connections["other"]
            name = f"{other.settings_dict['NAME']}_latin1"
            words = f"DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
            with temporary(f"CREATE {words}", f"DROP DATABASE {name}"), monkeypatch.context() as it:
                it.setitem(other.settings_dict, "NAME", name)
                with other.schema_editor() as editor:
                    editor.create_model(Typed)
                yield "other"
                other.close()

    @core.three_deliveries
    @core.each_size
    def test_i16_an_error_that_the_database_has_no_letters_for_is_recorded_in_plain_text(
        delivery: str, size: int, few_letters: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The attempt counts, and costs no other row anything."""
        every = Typed.objects.using(few_letters)
        for place in range(core.NUMBER):
            every.create(place=place, code=f"c{place:02}")

        def fail(row: Typed) -> None:
            if row.place == core.BAD:
                raise ValueError("café \N{GRINNING FACE}")

        tested = core.Core(every, delivery, size, core.STATES)
        tested.act = fail
        for attempt in (1, 2):
            report = tested.run()
            counts = {"processed": core.NUMBER - 1} if attempt == 1 else {}
            assert_run(report, failed=1, to_retry=1, redone=0, **counts)  # type: ignore[arg-type]
            [told] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
            assert "was recorded with a plain text, because the database refused it" in told
            caplog.clear()
            [error] = every.filter(attempts=attempt).values_list("last_error", flat=True)
            assert error == "ValueError: caf? ?"
        assert len(tested.calls) == core.NUMBER + 1
