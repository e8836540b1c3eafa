"""What the package uses of Django beyond its documentation: where, and in which shape."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import django
import pytest
from django.db import connection, connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper as SQLite
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Window, lookups, sql
from django.db.models.expressions import Col
from django.db.models.fields import json, related_lookups
from django.db.models.functions import RowNumber
from django.db.models.query import ModelIterable
from django.db.models.sql.datastructures import BaseTable, Join
from django.db.models.sql.where import AND, WhereNode
from django.db.transaction import Atomic
from django.test.utils import CaptureQueriesContext

from dcl_processor.checks import offline
from dcl_processor.compiled_sql.select import RowBuilder
from tests.environments import CHECKOUT
from tests.models import Depot, Parcel

PACKAGE = CHECKOUT / "dcl_processor"
PAGE = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Django's internals")[2].partition("\n## ")[0]

#: Which part of Django an expression is whose last name is one of these.
PARTS = {"query": "`Query`", "compiler": "`SQLCompiler`", "connection": "connection"}

#: What Django documents of these parts, or what every backend outside Django has to have.
DOCUMENTED = (
    "alias as_sql close compile connection cursor display_name ensure_connection features "
    "get_autocommit in_atomic_block introspection is_usable ops query rollback set_autocommit "
    "set_rollback settings_dict timezone vendor"
)
#: Of multiprocessing.
NOT_DJANGOS = frozenset({"_children", "_inheriting"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses(lines: list[str], node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the parts of Django, and their names, that one node of the code uses."""
    match node:
        case ast.Attribute(value=value, attr=name) if ast.unparse(value) not in {"self", "cls"}:
            before, _, last = ast.unparse(value).rpartition(".")
            # The connection of a connection is the driver's.
            last = "driver" if before and last == "connection" else last.removeprefix("_")
            # The linter refuses every other private name.
            if is_private(name) and "noqa: SLF001" in lines[node.lineno - 1]:
                yield "private names", name
            elif last in PARTS and not is_private(name):
                yield PARTS[last], name
        case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str(name)), *_]):
            if is_private(name):
                yield "private names", name
        case ast.Subscript(value=ast.Call(func=ast.Name("vars")), slice=ast.Constant(str(name))):
            yield "replaced on an instance", name


def used() -> dict[str, dict[str, set[str]]]:
    """Return the files that use each name, by the part of Django that it is of."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "from multiprocessing import connection" in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for part, name in uses(text.splitlines(), node):
                if name not in {*DOCUMENTED.split(), *NOT_DJANGOS}:
                    found[part][name].add(str(path.relative_to(PACKAGE)))
    return found


def test_the_table_lists_each_use_of_a_name_and_nothing_else() -> None:
    """A new use is a decision: list it, and pin below what is relied on."""
    rows = re.findall(r"^\| ([^|]+?) \| (`[^|]+) \| (`[^|]+) \|$", TABLE, re.MULTILINE)
    table = {
        part: (set(re.findall(r"`(\w+)`", names)), set(re.findall(r"`([\w/.]+)`", files)))
        for part, names, files in rows
    }
    code = {part: ({*names}, set().union(*names.values())) for part, names in used().items()}
    assert table == code


# --- in which shape

#: The attributes of a query that decide whether it is refused or an own-table question.
LOOKED_AT = (
    "alias_map alias_refcount annotations combinator distinct distinct_fields extra extra_tables "
    "group_by high_mark low_mark select_related where"
)
#: Those that do not change which rows a question returns once it is narrowed to some keys, or
#: do so only together with one of the others.
NOT_LOOKED_AT = (
    "_annotation_select_cache _extra_select_cache _filtered_relations alias_cols alias_prefix "
    "annotation_select_mask combinator_all combined_queries compiler default_cols "
    "default_ordering deferred_loading empty_result_set_value explain_info external_aliases "
    "extra_order_by extra_select_mask filter_is_sticky max_depth model order_by select "
    "select_for_no_key_update select_for_update select_for_update_nowait select_for_update_of "
    "select_for_update_skip_locked selected standard_ordering subq_aliases subquery table_map "
    "used_aliases values_select"
)
#: New in Django 6.0: whether a part of the query is a subquery, which the conditions show.
SINCE = {(6, 0): {"contains_subquery"}}


def attributes(query: sql.Query) -> set[str]:
    """Return the names of all that a query stores, on itself or as a default of its class."""
    defaults = {
        name
        for name, value in vars(sql.Query).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }
    return {*vars(query), *defaults}


def test_a_query_has_no_attribute_that_nobody_has_looked_at() -> None:
    new = {name for since, names in SINCE.items() if since <= django.VERSION for name in names}
    found, known = attributes(sql.Query(Parcel)), {*LOOKED_AT.split(), *NOT_LOOKED_AT.split(), *new}
    assert found - known == set(), (
        "Django has given Query new attributes. Decide for each whether it can change which rows a "
        "query returns; if so, is_own_table() or refuse() in candidates/question.py has to look at "
        "it. Then list it here."
    )
    assert known - found == set(), "Django has dropped these; see what became of their meaning."


def test_a_query_has_what_is_read_and_written() -> None:
    names = used()["`Query`"]
    query: Any = Parcel.objects.filter(depot__open=True).query.chain(sql.UpdateQuery)
    assert [name for name in names if not hasattr(query, name)] == []
    for copied in ("alias_map", "alias_refcount", "table_map"):
        assert isinstance(getattr(query, copied), dict)
    assert query.related_updates == {}
    query = Parcel.objects.all().query
    assert (query.standard_ordering, query.default_ordering) == (True, True)
    assert (query.select_for_update, query.distinct, query.is_sliced) == (False, False, False)
    assert (query.combinator, query.distinct_fields, query.group_by) == (None, (), None)
    assert (query.extra, query.extra_tables, query.select_related) == ({}, (), False)
    assert query.extra_order_by == ()


def test_aliases_say_which_tables_a_query_joins() -> None:
    query: Any = Parcel.objects.filter(depot__open=True).query
    table, join = query.alias_map.values()
    assert (type(table), type(join)) == (BaseTable, Join)
    assert (table.table_alias, table.parent_alias) == (query.base_table, None)
    field: Any = Parcel._meta.get_field("depot")
    assert (join.parent_alias, join.join_field) == (query.base_table, field)
    assert set(query.alias_refcount.values()) == {1}
    # The table of a join that was dropped stays in the map, and is counted no longer.
    dropped: Any = Parcel.objects.filter(depot__pk=1).query
    assert [count for count in dropped.alias_refcount.values() if count] == [1]


def test_conditions_are_a_tree_of_lookups_on_columns() -> None:
    where = Parcel.objects.filter(~Q(sent=True) | Q(weight__gt=5)).exclude(note="").query.where
    assert (where.connector, where.negated, where.contains_over_clause) == (AND, False, False)
    assert all(isinstance(child, WhereNode) for child in where.children)
    leaf: Any = Parcel.objects.filter(weight__gt=5).query.where.children[0]
    assert isinstance(leaf, lookups.Lookup)
    assert isinstance(leaf.lhs, Col)
    assert (leaf.lhs.alias, leaf.lhs.target.attname, leaf.rhs) == ("tests_parcel", "weight", 5)
    over = Parcel.objects.annotate(place=Window(RowNumber()))
    assert over.query.annotations["place"].contains_over_clause
    assert over.filter(place=1).query.where.contains_over_clause
    # A subquery is an expression, which shows what it takes of the outer query.
    depot = Depot.objects.filter(pk=OuterRef("depot_id"))
    exists: Any = Parcel.objects.annotate(there=Exists(depot)).query.annotations["there"]
    assert [column.alias for column in exists.get_external_cols()] == ["tests_parcel"]


def test_djangos_own_lookups_are_in_the_modules_that_are_known() -> None:
    known = {lookups.__name__, related_lookups.__name__}
    found = {
        type(Parcel.objects.filter(**{name: value}).query.where.children[0]).__module__
        for name, value in {
            "weight": 1,
            "weight__lt": 1,
            "weight__in": [1],
            "weight__isnull": True,
            "note__contains": "a",
            "depot": 1,
            "depot__in": [1],
        }.items()
    }
    assert found == known
    assert json.__name__ == "django.db.models.fields.json"


def test_a_queryset_has_its_private_attributes() -> None:
    queryset: Any = Parcel.objects.all()
    assert (queryset._db, queryset._hints, queryset._known_related_objects) == (None, {}, {})
    assert queryset._iterable_class is ModelIterable
    assert (queryset._result_cache, queryset._prefetch_done) == (None, False)
    assert queryset.using("other")._db == "other"
    depot = Depot(pk=1)
    related: Any = QuerySet(Depot, hints={"instance": depot})
    assert related._hints == {"instance": depot}
    assert Parcel()._state.db is None


@pytest.mark.django_db
def test_a_compiler_builds_rows_from_answers_that_it_is_given() -> None:
    """Again and again, by the queryset's own iterable, and nothing is sent."""
    queryset = Parcel.objects.annotate(more=F("tries") + 1).only("note")
    compiler: Any = queryset.query.get_compiler("default")
    compiler.as_sql()
    assert compiler.col_count == len(compiler.select) == 3
    assert all(len(each) == 3 for each in compiler.select)
    builder = RowBuilder(queryset, "default")
    assert [len(part) for part in builder.selected] == [2, 2, 2]
    with CaptureQueriesContext(connection) as context:
        for pk in (7, 8):
            [row] = builder.build([(pk, "note", 3, "one more column")])
            assert (row.pk, row.note, row.more) == (pk, "note", 3)
            assert row.get_deferred_fields() >= {"tries", "sent"}
        assert builder.build([]) == []
    assert len(context) == 0


@pytest.mark.django_db
def test_an_update_is_compiled_as_update_compiles_it() -> None:
    query: Any = Parcel.objects.filter(pk=1).query.chain(sql.UpdateQuery)
    query.add_update_values({"sent": True})
    with CaptureQueriesContext(connection) as context:
        Parcel.objects.filter(pk=1).update(sent=True)
    statement, params = query.get_compiler("default").as_sql()
    # psycopg writes a boolean in small letters where it shows the statement.
    sent = context.captured_queries[0]["sql"].lower()
    assert sent == (statement % tuple(map(str, params))).lower()


@pytest.mark.django_db(transaction=True)
def test_callbacks_wait_as_triples() -> None:
    def call() -> None: ...

    with transaction.atomic():
        transaction.on_commit(call, robust=True)
        # The stubs know them as pairs.
        waiting: Any = connection.run_on_commit
        assert waiting == [(set(), call, True)], (
            "expected (savepoints, callback, robust); correct delivery/in_transaction.py"
        )
        with transaction.atomic():
            transaction.on_commit(call)
            assert waiting[1] == ({*connection.savepoint_ids}, call, False)
        blocks: list[Any] = connection.atomic_blocks
        assert [(type(block), block._from_testcase) for block in blocks] == [(Atomic, False)]
        waiting.clear()
        connection.close()
        assert connection.closed_in_transaction


@pytest.mark.django_db
def test_a_test_cases_block_is_known() -> None:
    blocks: list[Any] = connection.atomic_blocks
    assert [block._from_testcase for block in blocks] == [True]


@pytest.mark.django_db(transaction=True)
def test_a_connection_has_what_is_read_and_written() -> None:
    connection.ensure_connection()
    only_there = {"is_in_memory_db": SQLite}
    names = {*used()["connection"]} - {"mysql_is_mariadb", *only_there}
    assert [name for name in names if not hasattr(connection, name)] == []
    assert [name for name, kind in only_there.items() if not hasattr(kind, name)] == []
    mysql = find_spec("django.db.backends.mysql")
    assert mysql is not None
    assert mysql.origin is not None
    base = Path(mysql.origin).with_name("base.py").read_text(encoding="utf-8")
    assert "def mysql_is_mariadb(self)" in base
    flags = (connection.errors_occurred, connection.needs_rollback, connection.autocommit)
    assert flags == (False, False, True)
    lists: list[Any] = [connection.run_on_commit, connection.savepoint_ids]
    assert [*lists, connection.atomic_blocks, connection.execute_wrappers] == [[], [], [], []]


@pytest.mark.django_db(transaction=True)
def test_a_cursor_is_made_by_the_method_that_is_replaced() -> None:
    made: list[Any] = []
    own: Any = connections["default"]  # without the proxy around it
    make = own._cursor

    def first(*args: Any, **options: Any) -> Any:
        made.append((args, options))
        return make(*args, **options)

    own._cursor = first
    try:
        for cursor in (own.cursor, own.chunked_cursor):
            with cursor():
                pass
    finally:
        del vars(own)["_cursor"]
    assert 1 <= len(made) <= 2
    assert own._cursor == make


def test_a_check_bars_every_way_to_the_database() -> None:
    assert all(callable(getattr(connection, way)) for way in offline._WAYS)


@pytest.mark.django_db
def test_the_locking_clause_is_made_by_name() -> None:
    if connection.vendor == "postgresql":
        lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
        assert lock == "FOR NO KEY UPDATE SKIP LOCKED"
    sqls = [
        getattr(connection.ops, f"savepoint_{kind}_sql")("a")
        for kind in ("create", "commit", "rollback")
    ]
    assert all("a" in each.lower() for each in sqls)
