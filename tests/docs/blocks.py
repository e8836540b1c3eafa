"""Run the code blocks of a page: Python, Python sessions and command lines.

``python`` blocks are executed, ``pycon`` and ``console`` blocks are executed and their output is
compared. Whatever a page shows without running it has another language: ``sh``, ``text``, ``ini``.

A block with a caption is a file of a project that the page makes from nothing. Such pages are
followed in a folder of their own (``reader``), with the commands that they show.
"""

from __future__ import annotations

import doctest
import io
import shlex
from collections.abc import Iterator
from pathlib import Path

from django.core.management import CommandError, call_command
from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser
from sybil.typing import Parser

from tests.docs.output import Checker, difference

MANAGE = "$ python manage.py "
EXIT_CODE = "$ echo $?"

#: Pages that make a project of their own; a test follows each of them.
FOLLOWED = (
    "docs/tutorial.md",
    "docs/howto/celery.md",
    "docs/howto/adopt.md",
    "docs/recipes/mail.md",
    "docs/recipes/charge.md",
    "docs/recipes/webhook.md",
    "docs/recipes/nightly.md",
)


def caption(example: Example) -> str | None:
    """Return the file that the block is, or None when it is a piece of code."""
    options = example.region.lexemes.get("options") or {}
    name: str | None = options.get("caption")
    return name


def run_python(example: Example) -> None:
    """Execute a block, unless it is a file of another project."""
    if caption(example) is None:
        PythonEvaluator()(example)


def run_session(example: Example) -> str:
    """Run one whole interactive session, in which each prompt's output must come as shown."""
    failures: list[str] = []
    test = doctest.DocTest(
        doctest.DocTestParser().get_examples(example.parsed),
        example.namespace,
        name=example.path,
        filename=None,
        lineno=example.line,
        docstring=None,
    )
    test.globs = example.namespace  # DocTest copies them, and the next block needs the names
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False)
    runner.run(test, out=failures.append, clear_globs=False)
    return "".join(failures)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command line of a ``console`` block with the output that is shown below it."""
    assert block.startswith("$ "), f"expected a command after '$ ', got {block!r}"
    for part in ("\n" + block).split("\n$ ")[1:]:
        command, _, output = part.partition("\n")
        # A backslash continues the line, as in a shell.
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = command[:-1] + more.removeprefix("> ").lstrip()
        yield f"$ {command}", output if not output or output.endswith("\n") else output + "\n"


def run_commands(example: Example) -> str:
    """Run ``manage.py`` commands in this process, on the test database."""
    if Path(example.path).as_posix().endswith(FOLLOWED):
        return ""
    code = 0
    for command, shown in commands(example.parsed):
        if command == EXIT_CODE:
            output = f"{code}\n"
        else:
            assert command.startswith(MANAGE), f"expected {MANAGE}…, got {command!r}"
            code, output = manage(shlex.split(command.removeprefix(MANAGE)))
        if problem := difference(shown, output):
            return f"{command}: {problem}"
    return ""


def manage(arguments: list[str]) -> tuple[int, str]:
    """Run one management command; return its exit code, and what it printed on both streams."""
    output = io.StringIO()
    try:
        call_command(*arguments, stdout=output, stderr=output, no_color=True)
    except CommandError as error:
        return error.returncode, f"{output.getvalue()}CommandError: {error}\n"
    except SystemExit as end:
        return int(end.code or 0), output.getvalue()
    return 0, output.getvalue()


PARSERS: list[Parser] = [
    CodeBlockParser("python", run_python),
    CodeBlockParser("pycon", run_session),
    CodeBlockParser("console", run_commands),
]
