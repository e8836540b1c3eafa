"""What a loop by hand costs, and what is left of it as a processor."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mailer.engine as mailer
import pytest
from email_relay import relay
from email_relay.models import Message, MessageManager
from post_office import mail as post_office

from tests.contract import test_mail_queues as queues
from tests.ported.lines import code_lines, lines, lines_of

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "loops.md"
HERE = Path(__file__).parent

#: Lines of code: as a processor, and by hand.
LINES: dict[str, tuple[int, int]] = {
    "broadcasts": (8, 19),
    "changes": (17, 37),
    "tasks": (11, 43),
    "prices": (13, 39),
    "jobs": (16, 50),
    "chats": (12, 48),
}

#: What the page calls each loop.
NAMED = {
    "broadcasts": "the notifications of each user are sent together, once",
    "changes": "changes are sent in bulk, with a result for each",
    "tasks": "tasks with a priority and attempts, claimed by a function of the database",
    "prices": "prices, with a related row that is locked, and three results",
    "jobs": "jobs with a limit for each kind, the worker's name, and attempts for each",
    "chats": "updates in the order of each chat",
    "django-email-relay": "the mails of django-email-relay",
    "django-mailer": "the mails of django-mailer",
    "django-post_office": "the mails of django-post_office",
}

#: The processor, and the functions of the package that choose, lock, send and mark mails.
MAILS: dict[str, tuple[Callable[..., Any], list[Callable[..., Any]]]] = {
    "django-email-relay": (
        queues.relay_processor,
        [
            relay.send_all,
            MessageManager.get_message_batch,
            MessageManager.get_message_for_sending,
            Message.mark_sent,
            Message.defer,
            Message.fail,
        ],
    ),
    "django-mailer": (
        queues.mailer_processor,
        [
            mailer.prioritize,
            mailer.sender_context.__wrapped__,
            mailer.get_messages_for_sending,
            mailer.handle_delivery_exception,
            mailer.acquire_lock,
            mailer.release_lock,
            mailer.send_all,
        ],
    ),
    "django-post_office": (
        queues.post_office_processor,
        [post_office.get_queued, post_office.send_queued, post_office._send_bulk],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_processor_is_shorter(name: str) -> None:
    processor, by_hand = lines("as_processor", name), lines("by_hand", name)
    assert (processor, by_hand) == LINES[name]
    assert processor < by_hand


def test_every_loop_is_counted() -> None:
    for way in ("as_processor", "by_hand"):
        modules = {path.stem for path in (HERE / way).glob("*.py")} - {"__init__"}
        assert modules == {*LINES}


@pytest.mark.parametrize("name", MAILS)
def test_the_processor_of_a_mail_queue_is_shorter_than_its_package(name: str) -> None:
    processor, functions = MAILS[name]
    assert 2 * lines_of(processor) < lines_of(*functions)


def test_the_page_has_the_lines_of_the_nine_loops() -> None:
    """A package may change; the page names the version that was counted."""
    part = PAGE.read_text(encoding="utf-8").partition("\n## Nine real loops\n")[2]
    part = part.partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|$", part, re.MULTILINE)
    found = {text: (int(ours), int(theirs)) for text, ours, theirs in rows}
    counted = {NAMED[name]: both for name, both in LINES.items()}
    for name, (processor, functions) in MAILS.items():
        theirs = found.get(NAMED[name], (0, 0))[1]
        if f"{name} {version(name)}" in " ".join(part.split()):
            theirs = lines_of(*functions)
        counted[NAMED[name]] = (lines_of(processor), theirs)
    assert found == counted
    assert len(found) == 9


def test_comments_docstrings_imports_and_gaps_are_no_lines() -> None:
    source = '''"""A module."""

import os
from os import (
    path,
)

# A comment.
def f():
    """Do it.

    Really.
    """
    return path, """a text
    of two lines"""
'''
    assert code_lines(source) == 3
