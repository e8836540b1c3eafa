"""``processors status``: what waits, what is stuck, since when and why; conditions for monitors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor.operator import actions as operator_actions
from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.report.errors import printable

from . import conditions, wording
from .command_line import NOT_FOUND_OUT, USAGE_ERROR, add_names, add_time_limit, named_or_all
from .conditions import duration
from .output import Output

if TYPE_CHECKING:
    from dcl_processor.insights.status import Status
    from dcl_processor.processor import BatchProcessor

HELP = "Show what waits, what is in progress, and what is stuck, since when and why."

#: The exit code for a monitor if a condition is met.
MET = 1


def tell_of_doubts(processor: BatchProcessor[Any], output: Output, using: str | None) -> int:
    """Write how many rows are in doubt, which no run handles; return how many."""
    number, sentence = operator_actions.doubts(processor, using)
    if number:
        output.trouble(processor.name, Trouble(sentence))
    return number


def add_arguments(parser: CommandParser) -> None:
    """Add the action's own options."""
    add_names(parser)
    parser.add_argument(
        "--fail-if",
        action="append",
        type=conditions.parse,
        default=[],
        metavar="CONDITION",
        help="End with 1 if this holds for a processor, such as 'in_doubt>0' or 'oldest>15m'; ask "
        "only for what the conditions need.",
    )
    parser.add_argument(
        "--in-doubt",
        type=duration,
        metavar="OLDER",
        help="The age from which a claim counts as in doubt (default, and least: 60 s for each "
        "row of batch_size).",
    )
    add_time_limit(parser)


def handle(output: Output, options: dict[str, Any]) -> None:
    """Show the processors, or check the conditions."""
    wanted: list[conditions.Condition] = options["fail_if"]
    chosen, left_out = named_or_all(options["names"])
    found = _ask(chosen, wanted, options)
    output.left_out(left_out)
    _refuse_unrecorded(found, wanted)
    shown = [] if wanted else (line for each in found for line in lines(each))
    output.answer([each.as_dict() for each in found], shown)
    met = _met(found, wanted)
    if said := [*met, *unknown(found, left_out), *_undecided(found, wanted)]:
        raise CommandError(joined(said), returncode=MET if met else NOT_FOUND_OUT)


def _ask(
    chosen: Iterable[BatchProcessor[Any]],
    wanted: Sequence[conditions.Condition],
    options: dict[str, Any],
) -> list[Status]:
    from dcl_processor import backlog  # as below
    from dcl_processor.insights import status as insights  # not for other actions

    down: dict[str, str] = {}
    numbers = (int(each.bound) for each in wanted if each.name in conditions.NUMBERS)
    return [
        insights.status(
            processor,
            using=options["using"],
            seconds=options["timeout"],
            doubt_after=options["in_doubt"],
            # Counted far enough to compare.
            most=max(backlog.MOST, *numbers, 0),
            only=[each.name for each in wanted] or None,
            down=down,
        )
        for processor in chosen
    ]


def _refuse_unrecorded(found: Sequence[Status], wanted: Sequence[conditions.Condition]) -> None:
    """Raise for a condition that no answer can ever meet: its monitor would always be green."""
    for each in found:
        for condition in wanted:
            answer = each.answers[condition.name]
            if answer.how == "not recorded":
                raise CommandError(
                    f"expected a condition with an answer that {each.name} has, got "
                    f"{condition.text!r}: {answer.why}; or name other processors.",
                    returncode=USAGE_ERROR,
                )


def _undecided(found: Sequence[Status], wanted: Sequence[conditions.Condition]) -> list[str]:
    return [
        f"{each.name}: {condition.text} could not be found out: "
        f"not all rows were looked at, got {_got(each, condition.name)}"
        for each in found
        for condition in wanted
        if each.answers[condition.name].how == "more than"
        and condition.holds(each.answers[condition.name]) is None
    ]


def unknown(found: Iterable[Status], left_out: Iterable[registry.Broken]) -> list[str]:
    """Return what could not be found out, and why; ``left_out``: what could not be imported."""
    names: dict[tuple[str, str], list[str]] = {}
    for each in found:
        for name, answer in each.answers.items():
            if answer.how == "unknown":
                names.setdefault((each.name, answer.why), []).append(name)
    said = [
        f"{name}: {', '.join(which)} could not be found out: {why}"
        for (name, why), which in names.items()
    ]
    return said + [f"{each.app}: its processors cannot be imported" for each in left_out]


def joined(sentences: Sequence[str]) -> str:
    """Return the sentences, some of which may have an end of their own, as one."""
    return f"{'; '.join(dict.fromkeys(each.rstrip('.') for each in sentences))}."


def _met(found: Sequence[Status], wanted: Sequence[conditions.Condition]) -> list[str]:
    return [
        f"{each.name}: {condition.text}, got {_got(each, condition.name)}"
        for each in found
        for condition in wanted
        if condition.holds(each.answers[condition.name])
    ]


def _got(found: Status, name: str) -> str:
    answer = found.answers[name]
    if name == "locked":
        found_ = str(answer.value and answer.value.rows)
        return f"at least {found_}" if answer.how == "more than" else found_
    return wording.answer(answer)


def lines(found: Status) -> Iterator[str]:
    """Yield the lines about one processor."""
    yield f"{found.name} ({found.delivery}, database {found.using!r})"
    answers = found.answers
    yield from _paused(found)
    for name, label in wording.LABELS.items():
        since = answers.get(f"{name}_since")
        since_when = f", since {wording.moment(since)}" if since and since.value else ""
        yield from _line(label, f"{wording.answer(answers[name])}{since_when}")
    yield from _line("last errors", *_errors(found))
    yield from _line("locked", *(wording.locked(answers["locked"]) or ["0"]))


def _paused(found: Status) -> Iterator[str]:
    """Yield what keeps rows from starting, if anything does; without the ledger nothing can."""
    answer = found.answers.get("paused")
    if answer is not None and answer.how == "unknown":
        yield from _line("paused", answer.missing)
    elif found.kept_back:
        yield from _line("not running", printable(found.kept_back))
    lost = found.answers.get("lost")
    if lost is not None and lost.value:
        yield from _line("lost runs", f"{lost.value:,}, see processors history")


def _line(label: str, *texts: str) -> Iterator[str]:
    return wording.labelled(label, 15, *texts)


def _errors(found: Status) -> list[str]:
    from dcl_processor.insights.rows import key_text  # not for other actions

    answer = found.answers["errors"]
    if answer.value is None:
        return [answer.missing]
    texts = [
        f"{group.rows:,} × {printable(group.example)} (row {printable(key_text(group.pk))})"
        for group in answer.value
    ]
    if answer.how == "more than":
        texts.append("and others, which were not read")
    return texts or ["none"]
