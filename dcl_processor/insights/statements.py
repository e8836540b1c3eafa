"""The statements that a run sends first, and their plans; none of them is executed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet, ValidationError
from django.db import connections
from django.db.models import Index, Model, QuerySet

from dcl_processor.candidates import groups, scan
from dcl_processor.candidates.pending_index import pending_index
from dcl_processor.candidates.question import Question
from dcl_processor.definition import model_columns
from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.engine import claim, marking
from dcl_processor.engine.marks import mark_of
from dcl_processor.locking.wanted import Wanted
from dcl_processor.processor import BatchProcessor

from . import catalog, rows


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, its parameters, and the alias that it is sent to."""

    sql: str
    params: Sequence[Any]
    using: str

    @property
    def text(self) -> str:
        """The statement with literal values."""
        connection: Any = connections[self.using]
        if not self.params:
            # The driver does the same with the placeholders' escapes.
            return self.sql.replace("%%", "%")
        if connection.vendor == "postgresql":
            return _text(connection.ops.compose_sql(self.sql, self.params))
        with connection.cursor() as cursor:
            if connection.vendor == "mysql":
                # Django has the text only of a statement that was executed.
                return _text(cursor.mogrify(self.sql, self.params))
            return _text(connection.ops.last_executed_query(cursor, self.sql, self.params))


def compiled(rows: QuerySet[Any, Any]) -> Statement | None:
    """Return the statement of a queryset; ``None`` if it has no row and is not sent."""
    try:
        sql, params = rows.query.get_compiler(rows.db).as_sql()
    except EmptyResultSet:
        return None
    return Statement(sql, params, rows.db)


def _text(filled: str | bytes) -> str:
    return filled.decode() if isinstance(filled, bytes) else filled


@dataclass(frozen=True, slots=True)
class Asked:
    """A processor, and the question that its next run would ask."""

    processor: BatchProcessor[Any]
    question: Question[Any]

    @classmethod
    def of(cls, processor: BatchProcessor[Any], using: str | None = None) -> Asked:
        """Ask as a run does; raises what a run would raise for the options."""
        # Without the processor's own conditions, because their columns are not checked yet.
        question = rows.question_of(processor, using)
        model_columns.check(processor, question.model, question.using)
        return cls(processor, rows.question_of(processor, using, processor._due))

    def read(self) -> Statement | None:
        """Return the lock-free read; ``None`` if the question has no row and is not sent."""
        rows: Any
        if (of_key := self._groups()) is not None:
            rows = groups.first_window(self.question, of_key)
        else:
            rows = scan.first_window(self.question, strict_order=self.processor.strict_order)
        return compiled(rows)

    def claim(self, pks: Sequence[Any]) -> list[Statement]:
        """Return the statements that lock these rows and check them again.

        With a delivery that marks its rows, and a question of one table, the same statement marks
        them; this is not so for the first rows of a run. To be called inside ``reading()``, because
        Django compiles a locking statement only inside a transaction.
        """
        question, wanted = self.question, Wanted(pks)
        is_marked = not rules_of(self.processor).in_transaction
        try:
            if is_marked and marking.suits(question):
                mark = mark_of(self.processor, question.model)
                update, params = marking.statement(question, mark, wanted)
                found = [(update.sql, params)]
            else:
                found = [*claim.statements(question, wanted)]
        except EmptyResultSet:
            return []
        return [Statement(sql, params, question.using) for sql, params in found]

    def keys(self) -> list[Any]:
        """Return keys of rows, pending or not, as many as a claim may have; the last of the table.

        They are read by the index of the primary key. An empty table has one made-up key.
        """
        size = self.processor.batch_size
        found = [*self.question.table.order_by("-pk").values_list("pk", flat=True)[:size]]
        if found:
            return found[::-1]
        try:
            first, *more = (each.to_python(1) for each in self.question.model._meta.pk_fields)
        except (ValidationError, TypeError, ValueError):
            return []
        return [(first, *more) if more else first]

    def age_index(self) -> Index | None:
        """Return the index from which the age of the oldest pending row is read.

        ``None``: ``pending_since`` is not set, or is no column of the table.
        """
        since = self.processor.pending_since
        columns = {each.name for each in self.question.model._meta.local_concrete_fields}
        if not isinstance(since, str) or since not in columns:
            return None
        return pending_index(self.question, since=since)

    def _groups(self) -> Groups | None:
        if self.processor.group_by is None:
            return None
        return groups_of(self.processor, self.question.model)


# --- how the database would execute a statement, which is not executed for that
#
# The statement is sent with EXPLAIN before it on the connection of its run, with the same
# parameters: a server that gets the parameters apart from the statement may plan differently.


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. ``lines``: as the database shows it.

    ``index``: the index of the table by which only some of its rows are read, if there is one.
    ``walks``: an index whose every entry is read instead, in its order. ``rows``: of the table, as
    the database estimates them; ``None`` if it does not.
    """

    lines: tuple[str, ...]
    index: str | None = None
    walks: str | None = None
    rows: float | None = None


def plan_of(statement: Statement, model: type[Model]) -> Plan | None:
    """Return the plan by which the statement reads the model's table.

    ``None``: this database is not asked, because its plans are not known here.
    """
    match connections[statement.using].vendor:
        case "postgresql":
            return _of_postgresql(statement, model)
        case "mysql":
            return _of_mysql(statement, model)
        case "sqlite":
            return _of_sqlite(statement, model)
        case _:
            return None


_HYPOPG = """
SELECT quote_ident(nspname) FROM pg_extension
JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'hypopg'
"""


def would_use(statement: Statement, model: type[Model], index: Index) -> bool | None:
    """Return whether PostgreSQL would read by this index, as it has it.

    The extension ``hypopg`` shows that without the index; ``None``: it is not installed.
    """
    connection = connections[statement.using]
    if connection.vendor != "postgresql":
        return None
    with connection.schema_editor(collect_sql=True) as editor:
        create = str(index.create_sql(model, editor))
    using = statement.using
    for (schema,) in catalog.rows(using, _HYPOPG):
        make = f"SELECT indexrelid, indexname FROM {schema}.hypopg_create_index(%s)"  # noqa: S608  # quoted
        ((oid, name),) = catalog.rows(using, make, [create])
        used = {each for node in _nodes(_json(statement)) for each, _ in _used(node)}
        catalog.rows(using, f"SELECT {schema}.hypopg_drop_index(%s)", [oid])
        return name in used
    return None


def estimated_rows(rows: QuerySet[Any, Any]) -> float | None:
    """Return how many rows the database expects the queryset to have; 0: it cannot have any.

    ``None``: this database has no such number, as SQLite has none.
    """
    statement = compiled(rows)
    if statement is None:
        return 0.0
    match connections[statement.using].vendor:
        case "postgresql":
            return float(_json(statement)["Plan Rows"])
        case "mysql":
            return _expected_by_mysql(statement)
        case _:
            return None


def _of_postgresql(statement: Statement, model: type[Model]) -> Plan:
    lines = tuple(line for (line,) in _explain(statement, "EXPLAIN"))
    parts = catalog.partitions(statement.using, model)
    known = catalog.indexes(statement.using, model, of=parts)
    partial = {each.name for each in known if each.is_partial}
    rows = catalog.table(statement.using, model).rows
    tables = set(map(_bare, [model._meta.db_table, *parts]))
    reads = [node for node in _nodes(_json(statement)) if node.get("Relation Name") in tables]
    used = [each for node in reads for each in _used(node)]
    # All rows of a partial index are asked for; of another one, those that meet a condition.
    narrow = [name for name, has_condition in used if has_condition or name in partial]
    wide = [name for name, _ in used if name not in narrow]
    is_served = bool(reads) and len(narrow) >= len(reads)
    index = narrow[0] if is_served else None
    return Plan(lines, index, walks=wide[0] if wide else None, rows=rows)


def _json(statement: Statement) -> Any:
    ((found,),) = _explain(statement, "EXPLAIN (FORMAT JSON)")
    return (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _bare(table: str) -> str:
    """Return a table's name without its schema and its quotes, as a plan has it."""
    return re.sub(r'^.*?"?\."?(?=[^.]+$)', "", table).strip('"')


def _used(node: Any) -> Iterator[tuple[str, bool]]:
    """Yield the indexes that a read of a table uses, and whether it looks up a part of them."""
    for each in _nodes(node):
        if "Index Name" in each:
            yield each["Index Name"], "Index Cond" in each


def _of_mysql(statement: Statement, model: type[Model]) -> Plan:
    connection: Any = connections[statement.using]
    # explain_format may be another one on MySQL; MariaDB has no such variable, and no such word.
    how = "EXPLAIN" if connection.mysql_is_mariadb else "EXPLAIN FORMAT=TRADITIONAL"
    names, found = _table(statement, how)
    lines = tuple(_line(names, row) for row in found)
    query = (
        "SELECT TABLE_ROWS FROM information_schema.TABLES"
        " WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = %s"
    )
    (rows,) = next(iter(catalog.rows(statement.using, query, [model._meta.db_table])), (None,))
    of_table = [dict(zip(names, row, strict=True)) for row in found]
    reads = [row for row in of_table if row["table"] == model._meta.db_table and row["key"]]
    narrow = [row["key"] for row in reads if _is_narrow(row, rows)]
    wide = [row["key"] for row in reads if not _is_narrow(row, rows)]
    index = narrow[0] if narrow and not wide else None
    return Plan(lines, index, walks=wide[0] if wide else None, rows=rows)


def _expected_by_mysql(statement: Statement) -> float:
    connection: Any = connections[statement.using]
    # Only with this word MariaDB shows which part of the rows it expects a condition to leave.
    how = "EXPLAIN EXTENDED" if connection.mysql_is_mariadb else "EXPLAIN FORMAT=TRADITIONAL"
    names, found = _table(statement, how)
    expected = 1.0
    for row in (dict(zip(names, each, strict=True)) for each in found):
        # A subquery and a derived table have lines of their own.
        if row["select_type"] in {"SIMPLE", "PRIMARY"}:
            expected *= _number(row["rows"]) * float(row["filtered"] or 100) / 100
    return expected


def _number(rows: Any) -> int:
    """Return a number of rows, behind which MariaDB may write a percentage."""
    return int(str(rows or 0).split(maxsplit=1)[0])


def _is_narrow(read: dict[str, Any], rows: float | None) -> bool:
    """Return whether a read by an index of MariaDB or MySQL is one of a small part of the table."""
    expected = _number(read["rows"])
    # Of the type index are reads of all entries; a lookup may expect most of the rows as well.
    return read["type"] != "index" and expected <= max(1, (rows or 0) / 4)


def _of_sqlite(statement: Statement, model: type[Model]) -> Plan:
    details = tuple(row[3] for row in _explain(statement, "EXPLAIN QUERY PLAN"))
    table = model._meta.db_table
    index = walks = None
    for detail in details:
        # Such as: SEARCH shop_order USING COVERING INDEX name (sent=?)
        how, _, rest = detail.partition(" ")
        if rest.split(" ")[0] != table:
            continue
        name = rest.partition(" INDEX ")[2].split(" ")[0]
        if how == "SEARCH":
            index = name or "the primary key"
        elif name and _is_partial(statement.using, table, name):
            index = name
        else:
            walks = name or None
    return Plan(details, index, walks=walks)


def _is_partial(using: str, table: str, name: str) -> bool:
    quoted = connections[using].ops.quote_name(table)
    found = catalog.rows(using, f"PRAGMA index_list({quoted})")
    return any(each == name and partial for _, each, _, _, partial in found)


def _explain(statement: Statement, how: str) -> list[Any]:
    return _table(statement, how)[1]


def _table(statement: Statement, how: str) -> tuple[list[str], list[Any]]:
    with connections[statement.using].cursor() as cursor:
        cursor.execute(f"{how} {statement.sql}", statement.params)
        return [column[0] for column in cursor.description or ()], cursor.fetchall()


def _line(names: list[str], row: Any) -> str:
    pairs = zip(names, row, strict=True)
    return ", ".join(f"{name}={value}" for name, value in pairs if value is not None)
