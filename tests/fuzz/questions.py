"""Strategies for pending querysets: the text of each, as a user would write it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.words import VALUES, Text, mostly
from tests.fuzz.worlds import World


def question(world: World, column: str, value: str) -> Text:
    """Return questions of rows whose column has that value, and that may ask for more."""
    links = st.lists(link(world), max_size=3).map("".join)
    half = either(world, column, value)
    return st.builds(
        lambda first, more, end: f"{world.source}{first}{more}{end}",
        mostly(heart(world, column, value), half, half, links),
        links,
        st.sampled_from(("",) * 30 + REFUSED),
    )


#: SQL by hand.
RAW = st.just("Q(RawSQL('1 = %s', [1], output_field=BooleanField()))")

#: Ends that have to be refused.
REFUSED = (
    "[:3]",
    ".values('pk')",
    ".values_list('pk', flat=True)",
    ".annotate(place=Window(RowNumber(), order_by='pk'))",
)


def heart(world: World, column: str, value: str) -> Text:
    """Return the ways to ask for one value of one column."""
    same, name = f"{column}={value}", world.name
    if value == "None":
        same = f"{column}__isnull=True"
    plain = (f".filter({same})", f".exclude(~Q({same}))", f".filter(Q({same}) | Q(pk__in=[]))")
    joined: tuple[str, ...] = (
        f".filter(pk__in={name}._base_manager.filter({same}))",
        f".filter(Exists({name}._base_manager.filter(pk=OuterRef('pk'), {same})))",
        f".filter(Case(When({same}, then=Value(True)), default=Value(False)))",
    )
    named = () if value == "None" else (f".alias(asked=F({column!r})).filter(asked={value})",)
    if world.name == "Seat":
        joined = joined[2:]
    return st.sampled_from(plain + plain + joined + named)


def either(world: World, column: str, value: str) -> Text:
    """Return questions that a row may stay in whatever becomes of the column."""
    same = "__isnull=True" if value == "None" else f"={value}"
    return st.builds(lambda other: f".filter(Q({column}{same}) | {other})", condition(world))


def link(world: World) -> Text:
    """Return one more call of the chain."""
    return st.one_of(
        st.builds(".filter({})".format, tree(world)),
        st.builds(".exclude({})".format, tree(world)),
        annotated(world),
        loaded(world),
        ordered(world),
        st.sampled_from((".distinct()", ".all()", ".select_for_update()", ".reverse()")),
    )


def tree(world: World) -> Text:
    """Return Q objects with ``&``, ``|``, ``^`` and ``~``."""
    return st.recursive(
        condition(world),
        lambda some: st.one_of(
            st.builds("~({})".format, some),
            st.builds("({} {} {})".format, some, st.sampled_from("&||^"), some),
        ),
        max_leaves=4,
    )


def condition(world: World) -> Text:
    """Return one condition, of the row's own columns or of what is beside it."""
    columns = st.sampled_from(sorted({**world.own, **world.across}.items()))
    compared = columns.flatmap(lambda column: comparison(*column))
    some = [compared, compared, between_columns(world), RAW]
    if world.beside:
        some.append(st.sampled_from(world.beside).flatmap(existing))
    return st.one_of(*some)


def comparison(name: str, kind: str) -> Text:
    kind = kind.rstrip("?")
    values = st.sampled_from(VALUES[kind])
    some = [
        st.builds(f"Q({name}={{}})".format, values),
        st.sampled_from((f"Q({name}__isnull=True)", f"Q({name}__isnull=False)")),
    ]
    if kind not in {"json", "bytes"}:
        several = st.lists(values, min_size=1, max_size=3).map(", ".join)
        some += [
            st.builds(f"Q({name}__in=[{{}}])".format, several),
            st.builds(f"Q({name}__{{}}={{}})".format, st.sampled_from(("lt", "gte")), values),
        ]
    if kind == "text":
        look = st.sampled_from(("startswith", "icontains", "iexact", "endswith"))
        some += [
            st.builds(f"Q({name}__{{}}={{}})".format, look, values),
            st.builds(f"Q(Exact(Upper({name!r}), {{}}))".format, values),
        ]
    if kind == "time":
        some.append(st.sampled_from((f"Q({name}__lte=Now())", f"Q({name}__year__gte=2100)")))
    if kind == "json":
        some.append(st.sampled_from((f"Q({name}__a=1)", f"Q({name}__has_key='a')")))
    if kind == "int":
        some.append(st.builds(f"Q(GreaterThan(F({name!r}) + 1, {{}}))".format, values))
    return st.one_of(*some)


def between_columns(world: World) -> Text:
    """Compare two columns of a kind."""
    ints = [name for name, kind in world.own.items() if kind.startswith("int")] or ["pk"]
    if world.name in {"Seat", "Letter", "Voucher"}:
        return st.just("Q(sent=F('sent'))")
    some = st.sampled_from(ints)
    return st.builds("Q({}__lte=F({!r}))".format, some, some)


def existing(beside: tuple[str, str, str, str]) -> Text:
    """Ask for a row beside the row."""
    model, key, column, kind = beside
    inner = f"{model}.objects.filter({key}=OuterRef('pk'), {column}={{}})"
    listed = f"{model}.objects.filter({column}={{}}).values({key!r})"
    way = st.sampled_from((f"Q(Exists({inner}))", f"Q(pk__in={listed})"))
    return st.builds(str.format, way, st.sampled_from(VALUES[kind]))


def annotated(world: World) -> Text:
    """Return annotations, some of which are asked at once."""
    column = st.sampled_from(sorted(world.own))
    some: list[Text] = [
        st.builds(".annotate(same=F({!r}))".format, column),
        st.builds(".annotate(one=Value({}))".format, st.sampled_from(("1", "'x'", "True"))),
        st.builds(".annotate(either=Coalesce({!r}, {!r}))".format, column, column),
    ]
    if world.many:
        many = st.sampled_from(world.many)
        some += [
            st.builds(".annotate(many=Count({!r}))".format, many),
            st.builds(".annotate(many=Count({!r})).filter(many__gte=1)".format, many),
            st.builds(
                ".annotate(many=Count({!r}, distinct=True, filter=Q({}__isnull=False)))".format,
                many,
                st.just(world.many[0]),
            ),
        ]
    if world.across:
        some.append(
            st.builds(".annotate(far=F({!r}))".format, st.sampled_from(sorted(world.across)))
        )
    for model, key, asked, _ in world.beside:
        inner = (
            f"{model}.objects.filter({key}=OuterRef('pk')).order_by('-pk').values({asked!r})[:1]"
        )
        some.append(st.just(f".annotate(last=Subquery({inner}))"))
    return st.one_of(*some)


def loaded(world: World) -> Text:
    """Return what decides which columns and which other rows come along."""
    column = st.sampled_from(sorted(world.own))
    some: list[Any] = [
        st.builds(".only({!r})".format, column),
        st.builds(".defer({!r})".format, column),
    ]
    if world.many:
        some.append(st.builds(".prefetch_related({!r})".format, st.sampled_from(world.many)))
    if world.one:
        some.append(st.builds(".select_related({!r})".format, st.sampled_from(world.one)))
    return st.one_of(*some)


def ordered(world: World) -> Text:
    """Return orders: up, down, nullable, random, across."""
    columns = st.sampled_from([*sorted(world.own), *sorted(world.across), "pk", "?"])
    return st.one_of(
        st.builds(
            ".order_by({!r})".format,
            st.builds(
                lambda name, sign: name if name == "?" else sign + name,
                columns,
                st.sampled_from(("", "-")),
            ),
        ),
        st.builds(
            ".order_by(F({!r}).desc(nulls_last=True), '-pk')".format,
            st.sampled_from(sorted(world.own)),
        ),
    )
