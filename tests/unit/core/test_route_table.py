"""Route tables: what is refused as impossible, and aliases that lead nowhere but back."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.route_table import (
    ALIAS_HOPS_MAX,
    FALLBACKS_MAX,
    TARGETS_MAX,
    Condition,
    Fallback,
    RouteTable,
    Target,
    alias_loop,
    fault,
    placed_targets,
)

A = Target(deployment="a")
OUTSIDE = Target(provider="far", model="m", context_tokens=100)


def a_table(*targets: Target, **fields: object) -> RouteTable:
    return RouteTable(**({"model": "name", "targets": targets} | fields))


def test_what_can_be_is_not_refused() -> None:
    short = Target(deployment="a", when=Condition(prompt_tokens_max=10))
    for table in (
        a_table(A),
        a_table(A, OUTSIDE, short, fallbacks=(Fallback(on=("error", "capacity"), target=A),)),
        a_table(A, msgspec.structs.replace(OUTSIDE, weight=0)),
        a_table(alias="other"),
    ):
        assert fault(table) is None


@pytest.mark.parametrize(
    ("table", "param"),
    [
        (a_table(alias="name"), "alias"),
        (a_table(A, alias="other"), "alias"),
        (a_table(alias="other", max_output_tokens=1), "alias"),
        (a_table(), "targets"),
        (a_table(*(Target(deployment=f"d{at}") for at in range(TARGETS_MAX + 1))), "targets"),
        (
            a_table(A, fallbacks=(Fallback(on=("error",), target=A),) * (FALLBACKS_MAX + 1)),
            "fallbacks",
        ),
        (a_table(Target(deployment="a", weight=0)), "targets"),
        (a_table(A, Target()), "targets.1"),
        (a_table(A, Target(deployment="a", provider="far")), "targets.1"),
        (a_table(Target(deployment="a", model="m")), "targets.0"),
        (a_table(Target(deployment="a", context_tokens=9)), "targets.0"),
        (a_table(Target(deployment="a", max_output_tokens=9)), "targets.0"),
        (a_table(Target(provider="far", context_tokens=9)), "targets.0.model"),
        (a_table(Target(provider="far", model="m")), "targets.0.context_tokens"),
        (
            a_table(
                Target(deployment="a", when=Condition(prompt_tokens_min=10, prompt_tokens_max=9))
            ),
            "targets.0.when.prompt_tokens_max",
        ),
        (a_table(A, OUTSIDE, A), "targets.2"),
        (a_table(A, fallbacks=(Fallback(on=("error",), target=Target()),)), "fallbacks.0.target"),
        (a_table(A, fallbacks=(Fallback(on=(), target=A),)), "fallbacks.0.on"),
        (a_table(A, fallbacks=(Fallback(on=("error", "error"), target=A),)), "fallbacks.0.on"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(table: RouteTable, param: str) -> None:
    found = fault(table)
    assert found is not None
    assert found.param == param


def test_a_plain_table_says_no_more_than_a_deployment() -> None:
    assert a_table(A, max_output_tokens=7).is_plain
    for table in (
        a_table(A, OUTSIDE),
        a_table(OUTSIDE),
        a_table(Target(deployment="a", weight=2)),
        a_table(A, fallbacks=(Fallback(on=("error",), target=A),)),
        a_table(alias="other"),
    ):
        assert not table.is_plain


def test_names_of_targets_and_the_paths_of_their_fields() -> None:
    table = a_table(A, fallbacks=(Fallback(on=("error",), target=OUTSIDE),))
    assert [(path, target.name) for path, target in placed_targets(table)] == [
        ("targets.0", "a"),
        ("fallbacks.0.target", "far/m"),
    ]
    assert not A.when.counts
    assert Condition(prompt_tokens_min=1).counts


def an_alias(name: str, leads: str, tenant: str = "") -> RouteTable:
    return RouteTable(model=name, alias=leads, tenant=tenant)


def test_a_loop_of_aliases_is_found_for_everybody_and_for_one_tenant() -> None:
    line = [an_alias("a", "b"), an_alias("b", "c"), a_table(A, model="c")]
    assert alias_loop(line) is None
    assert alias_loop([*line[:2], an_alias("c", "a")]) == ("a", "b", "c", "a")
    # Everybody's a leads to b, and one tenant's b back: for that tenant alone it is a loop.
    assert alias_loop([*line, an_alias("b", "a", "ten")]) == ("a", "b", "a")
    # A tenant's own table ends what would be a loop for it; everybody's is one all the same.
    mine = a_table(A, model="b", tenant="ten")
    assert alias_loop([an_alias("a", "b"), mine]) is None
    assert alias_loop([an_alias("a", "b"), an_alias("b", "a"), mine]) == ("a", "b", "a")


def test_a_chain_of_too_many_aliases_counts_as_a_loop() -> None:
    chain = [an_alias(f"n{at}", f"n{at + 1}") for at in range(ALIAS_HOPS_MAX + 1)]
    assert alias_loop(chain[:-1]) is None
    assert alias_loop(chain) is not None


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("abcdef"), max_size=6))
def test_without_a_loop_every_name_ends(aliases: dict[str, str]) -> None:
    loop = alias_loop([an_alias(name, leads) for name, leads in aliases.items()])
    for name in aliases:
        seen = [name]
        while seen[-1] in aliases and len(seen) <= len(aliases):
            seen.append(aliases[seen[-1]])
        if loop is None:
            assert len(set(seen)) == len(seen)
    if loop is not None:
        assert all(aliases[name] == leads for name, leads in pairwise(loop))
