"""Strategies for flips: the text of what is written to a row that was handled."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.words import VALUES, Text, mostly
from tests.fuzz.worlds import World


def flip(world: World, column: str, value: str) -> Text:
    """Return flips that most often take another value to the column than the one asked for."""
    kind = world.own[column]
    others = [text for text in possible(kind) if text != value]
    usual = st.sampled_from(others).flatmap(lambda text: written(kind, text))
    one = st.builds(f"{{{{{column!r}: {{}}}}}}".format, usual)
    return mostly(one, with_another(world, column, usual), odd(world, column))


def possible(kind: str) -> list[str]:
    """Return the values of a kind of column."""
    return [*VALUES[kind.rstrip("?")], *(["None"] if kind.endswith("?") else [])]


def written(kind: str, text: str) -> Text:
    """Return the ways to write a value."""
    ways = ["{}", "{}", "{}", "lambda: {}"]
    if text != "None" and not kind.startswith(("json", "bytes", "word")):
        ways.append("Value({})")
    if kind.startswith("text"):
        ways += ["lazily({})", "Concat(Value({}), Value(''))"]
    if kind.startswith("time"):
        ways += ["Now()"]
    if kind.startswith("bool") and text != "None":
        ways += ["int({})"]
    return st.sampled_from([way.format(text) for way in ways])


def claim(world: World, column: str, value: str, done: str) -> Text | None:
    """Return what marks a row as claimed; ``None``: no value is left that is neither."""
    others = [text for text in possible(world.own[column]) if text != value]
    another = with_another(world, column, st.sampled_from(others))
    third = [text for text in others if text not in done]
    if third:
        one = st.builds(f"{{{{{column!r}: {{}}}}}}".format, st.sampled_from(third))
        return mostly(one, another, odd(world, column))
    return mostly(another, odd(world, column)) if len(world.own) > 1 else None


def with_another(world: World, column: str, usual: Text) -> Text:
    """Write a second column as well, which may be a foreign key."""
    names = [name for name in world.own if name != column]
    if not names:
        return st.builds(f"{{{{{column!r}: {{}}}}}}".format, usual)
    second = st.sampled_from(names).flatmap(
        lambda name: st.builds(
            f"{name!r}: {{}}".format,
            st.one_of(st.sampled_from(possible(world.own[name])), st.just(f"F({name!r})")),
        )
    )
    keys = [name for name in ("depot", "depot_id") if "depot" in world.one]
    if keys:
        second = second | st.builds(
            "{!r}: {}".format,
            st.sampled_from(keys),
            st.sampled_from(("None", "F('depot')", "F('depot_id')", "Depot.objects.first")),
        )
    return st.builds(f"{{{{{column!r}: {{}}, {{}}}}}}".format, usual, second)


def odd(world: World, column: str) -> Text:
    """Return flips that are wrong, do not matter, or depend on the row."""
    some = [
        "{'nope': True}",
        "{'pk': 1}",
        "{'depot__open': False}",
        f"{{{column!r}: None}}",
        f"{{{column!r}: F({column!r})}}",
    ]
    some += [f"{{{name!r}: F({name!r}) + 1}}" for name, k in world.own.items() if k == "int"]
    some += [f"{{{name!r}: {possible(kind)[0]}}}" for name, kind in world.own.items()]
    return st.sampled_from(some)
