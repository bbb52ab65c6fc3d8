"""Tables at each share: what is another's stays, weights keep their proportions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.rollouts.tables import leads_to, promoted, returned, same, split, unfit
from core.route_table import Condition, Fallback, RouteTable, Target, fault
from tests.support.rollout_world import PLAN, TABLE

CONDITIONS = (Condition(), Condition(tools=True), Condition(tags={"team": "a"}))
NAMES = ("old", "other", "third")
WEIGHTS = st.integers(0, 10_000)
TARGETS = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), WEIGHTS, min_size=1, max_size=6
)


@st.composite
def tables(draw) -> RouteTable:
    found = draw(TARGETS) | {("old", 0): draw(st.integers(1, 10_000))}
    targets = tuple(
        Target(deployment=name, weight=weight, when=CONDITIONS[at])
        for (name, at), weight in found.items()
    )
    spare = Fallback(on=("error",), target=Target(deployment="old"))
    return RouteTable(model="smol", targets=targets, fallbacks=(spare,), version=3)


def shares(table: RouteTable) -> dict[tuple[str, int], Fraction]:
    total = sum(t.weight for t in table.targets)
    return {
        (t.deployment, CONDITIONS.index(t.when)): Fraction(t.weight, total) for t in table.targets
    }


@given(base=tables(), percent=st.integers(0, 100))
def test_a_share_is_exact_and_others_keep_theirs(base, percent):
    assert unfit(base, PLAN) is None
    table = split(base, PLAN, percent)
    assert fault(table) is None
    before, after = shares(base), shares(table)
    for (name, at), share in before.items():
        if name == "old":
            assert after["new", at] == share * percent / 100
            assert after["old", at] == share * (100 - percent) / 100
        else:
            assert after[name, at] == share


@given(base=tables(), percent=st.integers(0, 100), keep=st.booleans())
def test_what_was_given_comes_back(base, percent, keep):
    table = returned(split(base, PLAN, percent), PLAN, keep=keep)
    after = shares(table)
    assert {n: s for n, s in after.items() if n[0] != "new"} == shares(base)
    assert all(after[name] == 0 for name in after if name[0] == "new")
    assert leads_to(table, "new") == keep
    assert table.fallbacks == base.fallbacks


@given(base=tables())
def test_promoted_is_the_canary_in_the_place_of_the_stable(base):
    table = promoted(base, PLAN)
    assert not leads_to(table, "old")
    assert [t.weight for t in table.targets] == [t.weight for t in base.targets]
    assert table.fallbacks[0].target.deployment == "new"


def test_a_table_of_another_hand_loses_the_canary_and_nothing_else():
    canary = Target(deployment="new", weight=30, when=CONDITIONS[1], first_token_ms=9)
    table = RouteTable(
        model="smol",
        targets=(Target(deployment="other", weight=70), canary),
        fallbacks=(
            Fallback(on=("error",), target=Target(deployment="new")),
            Fallback(on=("error",), target=Target(deployment="other")),
        ),
    )
    gone = returned(table, PLAN, keep=False)
    heir = Target(deployment="old", weight=3, when=CONDITIONS[1], first_token_ms=9)
    assert gone.targets == (Target(deployment="other", weight=7), heir)
    assert gone.fallbacks == table.fallbacks[1:]
    assert returned(table, PLAN, keep=True).fallbacks == table.fallbacks
    # The stable's and the canary's weights together may be more than a weight can be.
    heavy = RouteTable(
        model="smol",
        targets=(
            Target(deployment="old", weight=999_999),
            Target(deployment="new", weight=7),
            Target(deployment="other", weight=1),
        ),
    )
    assert fault(returned(heavy, PLAN, keep=False)) is None
    idle = RouteTable(model="smol", targets=(Target(deployment="new", weight=0),))
    assert returned(idle, PLAN, keep=False).targets == (Target(deployment="old", weight=0),)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "no route table"),
        (RouteTable(model="smol", alias="fast"), "an alias of fast"),
        (replace(TABLE, targets=(Target(deployment="old", weight=0),)), "has no weight"),
        (replace(TABLE, targets=(Target(deployment="new"),)), "leads to new already"),
        (
            replace(
                TABLE,
                fallbacks=(Fallback(on=("error",), target=Target(deployment="new")),),
            ),
            "leads to new already",
        ),
        (replace(TABLE, targets=(Target(deployment="old", weight=10_001),)), "above 10000"),
        (
            replace(
                TABLE,
                targets=(*TABLE.targets, *(Target(deployment=f"d{n}") for n in range(31))),
            ),
            "at most 32 targets",
        ),
    ],
)
def test_a_table_that_no_rollout_can_begin_on_says_why(table, said):
    assert said in str(unfit(table, PLAN))


def test_who_wrote_a_table_makes_no_difference():
    assert same(replace(TABLE, version=99, created_ms=5), TABLE)
    assert not same(replace(TABLE, max_output_tokens=5), TABLE)
    assert not same(None, TABLE)
