"""Where processors are found, and by which names."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.test import override_settings

from dcl_processor.exceptions import InvalidOption, ProcessorError, UnknownProcessor, Unsupported
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import there_is_no_such_module", "ModuleNotFoundError: No module named 'there_is_no_"),
        ("raise SystemExit('no')", "SystemExit: no ("),
        ("if:", "SyntaxError: invalid syntax"),
        ("batch_processor(pending=Parcel.objects.all(), doen={})(print)", "has no option 'doen'"),
    ],
)
def test_a_module_that_raises_takes_out_its_own_app_alone(
    install: Install, line: str, words: str
) -> None:
    install("before", SEND)
    install("post", line)
    install("after", SEND)
    assert {"before.send", "after.send"} <= set(registry.processors())
    assert [each.name for each in registry.get(["after.send"])] == ["after.send"]
    [broken] = registry.broken()
    said = str(broken)
    assert said.startswith("expected post.processors to be imported, got ")
    assert words in said
    assert "processors.py, line 3)" in said
    assert said.endswith("; its processors are left out.")
    with pytest.raises(UnknownProcessor, match=r"post\.processors to be imported"):
        registry.get(["post.send"])


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


def test_a_missing_module_called_like_ours_is_not_taken_for_none(install: Install) -> None:
    """processors.py exists, and what it imports does not: that is no app without processors."""
    install("post", "import post.processors.more")
    [broken] = registry.broken()
    assert (broken.app, type(broken.error)) == ("post", ModuleNotFoundError)


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


def test_an_unknown_name_is_refused_with_the_known_ones(install: Install) -> None:
    install("post", SEND)
    with pytest.raises(UnknownProcessor) as caught:
        registry.get(["send"])
    known = ", ".join(registry.processors())
    assert str(caught.value).startswith(
        f"expected the name of a processor, one of {known}, got 'send'; processors are those in"
    )
    assert "post.send" in known
    assert isinstance(caught.value, ProcessorError)


@override_settings(INSTALLED_APPS=["django.contrib.contenttypes", "dcl_processor"])
def test_where_there_are_none_it_says_where_to_put_one() -> None:
    with pytest.raises(UnknownProcessor, match=r"processors\.py of an app"):
        registry.get(["post.send"])
