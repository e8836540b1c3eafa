"""``processors explain`` and ``doctor``: what the database does with a processor's questions.

The first shows their SQL, their plan and the index for it; the second what is wrong with the
databases, tables and options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from textwrap import indent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.report.errors import escaped, printable

from .command_line import NOT_FOUND_OUT, add_names, add_time_limit, choose, named_or_all
from .output import Output

if TYPE_CHECKING:
    from dcl_processor.insights.explanation import Explanation


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="Processors to explain.")
    add_time_limit(parser)


def _explain(output: Output, options: dict[str, Any]) -> None:
    """Explain each processor; raise ``CommandError`` if one could not be explained."""
    from dcl_processor.insights.explanation import explanation  # not for a run

    failed = []
    for processor in choose(options["names"]):
        try:
            found = explanation(processor, options["using"], seconds=options["timeout"])
        except Exception as error:  # noqa: BLE001  # the others can be explained
            output.broke(processor.name, Trouble.of(error, processor, options["using"]))
            failed.append(processor.name)
        else:
            output.answer(found.as_dict(), _lines(found))
    if failed:
        raise CommandError(
            f"{' and '.join(failed)} could not be explained.", returncode=NOT_FOUND_OUT
        )


def _lines(found: Explanation) -> Iterator[str]:
    from dcl_processor.insights import pending_index  # not for other actions

    yield f"{found.name}: {found.delivery}, {found.model._meta.label} on {found.using!r}"
    if found.read is not None:
        yield from _part("The lock-free read:", found.read)
    if found.plan is not None:
        yield from _part("The plan of the lock-free read:", *found.plan.lines)
    yield f"\n{escaped(found.verdict)}"
    if found.index is not None:
        yield from _suggestion(found)
    if found.in_flight_index is not None:
        yield "\nThe rows of a key that are in progress are found by this index, which is to be"
        yield f"among the Meta.indexes of {found.index_model._meta.label}, too:"
        yield "\n" + indent(f"{pending_index.source(found.in_flight_index)},", "    ")
    if found.age_index is not None:
        yield "\nThe age of the oldest pending row is read from all pending rows, unless this index"
        yield f"is among the Meta.indexes of {found.model._meta.label}, too:"
        yield "\n" + indent(f"{pending_index.source(found.age_index)},", "    ")
    for remark in found.remarks:
        yield f"\n{remark}"


def _part(title: str, *texts: str) -> Iterator[str]:
    yield f"\n{title}"
    # A literal may be text from outside, and must not forge a line. Its blanks stay as they are.
    yield from (indent(escaped(text), "    ") for text in texts)


def _suggestion(found: Explanation) -> Iterator[str]:
    from dcl_processor.insights import pending_index  # not for other actions

    index, label = found.index, found.index_model._meta.label
    assert index is not None
    if found.is_declared:
        yield (
            f"\nThe Meta.indexes of {label} have one that would serve it. It is not migrated, the "
            "table is too small for it, or the statistics are old (ANALYZE)."
        )
        return
    yield f"\nThis index would serve it. Add it to the Meta.indexes of {label}:"
    yield "\n" + indent("\n".join(pending_index.imports(index)), "    ")
    yield "\n" + indent(f"{pending_index.source(index)},", "    ")
    yield (
        "\nIn the migration that makemigrations writes, set atomic = False, and replace\n"
        "AddIndex by AddIndexConcurrently (django.contrib.postgres.operations), which\n"
        "does not block writes."
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add_names(parser)
    add_time_limit(parser)


def _examine(output: Output, options: dict[str, Any]) -> None:
    """Write the findings; raise ``CommandError`` if something is wrong, or was not found out."""
    from dcl_processor.insights.answer import Level
    from dcl_processor.insights.doctor import examine  # not for a run

    chosen, left_out = named_or_all(options["names"])
    output.left_out(left_out)
    found = list(examine(chosen, using=options["using"], seconds=options["timeout"]))
    # A name in the database may be chosen by any of its roles, and must not forge a line.
    output.answer([each.as_dict() for each in found], (printable(str(each)) for each in found))
    levels = [each.level for each in found]
    if number := sum(level in (Level.PROBLEM, Level.WARNING) for level in levels):
        raise CommandError(f"{number} of {len(found)} findings need attention.", returncode=1)
    if left_out or Level.UNKNOWN in levels:
        raise CommandError("not everything could be found out.", returncode=NOT_FOUND_OUT)


EXPLAIN = SimpleNamespace(
    HELP="Show the SQL of a processor, the plan of its read, and the index that serves it.",
    add_arguments=_add_names,
    handle=_explain,
)
DOCTOR = SimpleNamespace(
    HELP="Examine what processors need of their databases, tables and options.",
    add_arguments=_add_doctor,
    handle=_examine,
)
