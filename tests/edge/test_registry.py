"""Where processors are found, and by which names."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.test import override_settings

from dcl_processor.exceptions import InvalidOption, UnknownProcessor, Unsupported
from dcl_processor.operator import registry
from tests.edge.manage import Install
from tests.models import Parcel

SEND = """
    @batch_processor(pending=Parcel.objects.filter(sent=False), done={"sent": True})
    def send(parcel): pass
"""


def found_in(app: str) -> list[registry.Found]:
    return registry.survey([apps.get_app_config(app)])[0]


def test_both_spellings_are_found_in_the_order_of_the_module(install: Install) -> None:
    """A function and an instance of a class; the class itself is no processor."""
    install(
        "post",
        SEND
        + """
    class Sort(BatchProcessor):
        def pending(self): return Parcel.objects.all()
        def process(self, row): pass
    sort = Sort(name="post.sort")
    """,
    )
    assert [(each.processor.name, each.place) for each in found_in("post")] == [
        ("post.send", "post.processors.send"),
        ("post.sort", "post.processors.sort"),
    ]


def test_an_instance_under_several_names_counts_once(install: Install) -> None:
    """Under two names of one module, and imported into another app's."""
    install("post", SEND + "\n    again = send\n")
    install("office", "from post.processors import send as post_send\n")
    assert [each.processor.name for each in found_in("post")] == ["post.send"]
    assert list(registry.processors()).count("post.send") == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("call", ["send()", "send.run(limit=1)", "send.dry_run()"])
@pytest.mark.parametrize("command", ["check", "processors"])
def test_a_call_at_module_level_is_refused_and_handles_no_row(
    install: Install, command: str, call: str
) -> None:
    """It would run at each manage.py check."""
    Parcel.objects.create()
    body = SEND.replace("pass", "raise AssertionError")
    install("post", f"{body}\n    {call}\n")
    line = 3 + body.count("\n") + 1
    refused = (
        "expected post.send to run after post.processors is imported, got a call at module level; "
        "move it into a function, or remove it"
    )
    with pytest.raises((Unsupported, CommandError)) as caught:
        call_command(*((command,) if command == "check" else (command, "run", "post.send")))
    assert refused in str(caught.value)
    assert Parcel.objects.get().sent is False
    [broken] = registry.broken()
    assert f"Unsupported: {refused}" in str(broken)
    assert str(broken).endswith(f"/post/processors.py, line {line}); its processors are left out.")


def test_two_processors_of_one_name_are_refused_with_both_places(install: Install) -> None:
    install("post", SEND)
    install(
        "office",
        """
    @batch_processor(pending=Parcel.objects.all(), done={"sent": True}, name="post.send")
    def other(parcel): pass
    """,
    )
    with pytest.raises(InvalidOption) as caught:
        registry.processors()
    assert str(caught.value) == (
        "expected processors to have different names, got 'post.send' for both "
        "post.processors.send and office.processors.other; set name= on one of them."
    )


@override_settings(INSTALLED_APPS=["django.contrib.contenttypes", "dcl_processor"])
def test_where_there_are_none_it_says_where_to_put_one() -> None:
    with pytest.raises(UnknownProcessor, match=r"processors\.py of an app"):
        registry.get(["post.send"])
