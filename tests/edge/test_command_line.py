"""A command line with a mistake ends with 2, and one sentence that has what was meant."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command

from tests.edge.manage import Manage, processors

RUN = "manage.py processors run"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "x", "--limitt", "5"],
            f"expected an option of {RUN}, got '--limitt'; did you mean --limit?",
        ),
        (
            ["run", "x", "--untill=5m"],
            f"expected an option of {RUN}, got '--untill'; --until is an option of pause.",
        ),
        (
            ["run", "list", "--everywhere", "yes"],
            f"expected an option of {RUN}, got '--everywhere'; see {RUN} --help.",
        ),
        (
            # The typing error, and not the option that is missing by it.
            ["requeue", "x", "--pkk", "7"],
            "expected an option of manage.py processors requeue, got '--pkk'; did you mean --pk?",
        ),
        (
            ["--jsn", "run", "x"],
            (
                "expected an option of manage.py processors, got '--jsn'; see manage.py "
                "processors --help."
            ),
        ),
        (
            ["show", "x", "1", "2"],
            "expected no more arguments, got '2'; see manage.py processors show --help.",
        ),
        (
            ["run", "x", "--limit", "many"],
            f"argument --limit: expected a number of rows from 0, got 'many'; see {RUN} --help.",
        ),
        (
            ["show"],
            "the following arguments are required: NAME, PK; see manage.py processors show --help.",
        ),
        (
            [],
            "the following arguments are required: ACTION; see manage.py processors --help.",
        ),
    ],
)
def test_a_mistake_is_one_sentence(manage: Manage, arguments: list[str], sentence: str) -> None:
    assert manage(*arguments) == (2, "", f"CommandError: {sentence}\n")


def test_a_wrong_action_is_named_with_the_nearest(manage: Manage) -> None:
    done = manage("requeu", "x", "--pk", "7")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("CommandError: expected an action, one of run, list, status, show, ")
    assert done.err.endswith(" doctor, metrics, got 'requeu'; did you mean requeue?\n")
    assert manage("everything").err.endswith(", metrics, got 'everything'.\n")


def test_an_option_that_is_only_a_little_alike_is_not_suggested(manage: Manage) -> None:
    """It may do something else: "--untill" is more like "--all" than like most words."""
    assert "--all" not in manage("run", "x", "--untill").err


@pytest.mark.django_db(transaction=True)
def test_a_program_that_calls_the_command_gets_the_sentence(installed: None) -> None:
    with pytest.raises(
        CommandError, match=r"^expected an option of .* did you mean --limit"
    ) as got:
        call_command("processors", "run", "warehouse.deliver", "--limitt", "5")
    assert got.value.returncode == 2
    call_command("processors", "run", "warehouse.deliver", limit=1, verbosity=0)


@pytest.mark.django_db(transaction=True)
def test_in_a_process_of_its_own_it_ends_in_the_same_way() -> None:
    done = processors("run", "warehouse.deliver", "--limitt", "5")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    help_ = processors("run", "--help")
    assert (help_.returncode, "--fail-in-doubt" in help_.stdout) == (0, True)
