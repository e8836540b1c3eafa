"""What the package uses of Django beyond its documentation: where, and in which shape."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import django
from django.db.backends.mysql.features import DatabaseFeatures
from django.db.models import sql

from tests.environments import CHECKOUT
from tests.models import Parcel

PACKAGE = CHECKOUT / "dcl_processor"
PAGE = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Django's internals")[2].partition("\n## ")[0]

#: Which part of Django an expression is whose last name is one of these.
PARTS = {"query": "`Query`", "compiler": "`SQLCompiler`", "connection": "connection"}

#: What Django documents of these parts, or what every backend outside Django has to have.
DOCUMENTED = (
    "alias as_sql close compile connection cursor display_name ensure_connection features "
    "get_autocommit in_atomic_block introspection is_usable ops query rollback schema_editor "
    "set_autocommit set_rollback settings_dict timezone vendor"
)


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
                if name not in DOCUMENTED.split():
                    found[part][name].add(str(path.relative_to(PACKAGE)))
    return found


def test_the_table_lists_each_use_of_a_name_and_nothing_else() -> None:
    """A new use is a decision: list it."""
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
        "query returns; if so, is_own_table() or refuse() in pending/question.py has to look at "
        "it. Then list it here."
    )
    assert known - found == set(), "Django has dropped these; see what became of their meaning."


def test_the_readme_names_no_mariadb_that_this_django_refuses() -> None:
    connection: Any = SimpleNamespace(mysql_is_mariadb=True)
    least = DatabaseFeatures(connection).minimum_database_version
    readme = " ".join((CHECKOUT / "README.md").read_text(encoding="utf-8").split())
    release = re.escape(".".join(django.__version__.split(".")[:2]))
    said = re.search(rf"MariaDB,.* from ([0-9.]+) with Django (?:[0-9.]+ and )?{release}\b", readme)
    assert said is not None
    assert tuple(map(int, said[1].split("."))) >= least
