"""Plans: weights are honoured exactly, bindings kept, conditions asked, and spares end."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.registry import ProviderModel, ServedModel
from core.route_table import CAUSES, Condition, Target
from gateway.route_index import Option, Route, Spare
from gateway.route_plan import (
    DRAWS,
    FIRST,
    Facts,
    Plan,
    holds,
    pick,
    plan,
    too_long,
)

NO_FACTS = Facts()


def an_option(name: str, weight: int = 1, **when: Any) -> Option:
    return Option(
        target=Target(deployment=name, weight=weight, when=Condition(**when)),
        model=ServedModel(
            model="m",
            version="v",
            deployment=name,
            pool=f"{name}@local",
            family="llama",
            context_tokens=100,
            max_output_tokens=0,
            created_ms=0,
            route_version=1,
        ),
    )


def a_route(*options: Option, spares: tuple[Spare, ...] = ()) -> Route:
    return Route(name="m", options=options, spares=spares)


def planned(route: Route, facts: Facts = NO_FACTS, draw: int = 0) -> Plan:
    made = plan(route, facts, draw)
    assert isinstance(made, Plan)
    return made


weights = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(weights, st.integers(1, 5))
def test_over_all_draws_each_target_has_exactly_its_share(chosen: list[int], times: int) -> None:
    options = [an_option(f"d{at}", weight) for at, weight in enumerate(chosen)]
    draws = sum(chosen) * times
    found = [pick(options, draw, draws) for draw in range(draws)]
    picked = Counter(option.name for option in found if option is not None)
    assert picked == {f"d{at}": weight * times for at, weight in enumerate(chosen) if weight}


@given(weights, st.integers(0, DRAWS - 1))
def test_a_draw_picks_one_with_a_weight(chosen: list[int], draw: int) -> None:
    options = [an_option(f"d{at}", weight) for at, weight in enumerate(chosen)]
    found = pick(options, draw)
    assert found is not None
    assert found.target.weight
    assert pick([an_option("a", 0)], draw) is None


def test_a_new_target_at_the_end_takes_conversations_from_others_and_moves_none_between_them() -> (
    None
):
    old = [an_option("a", 50), an_option("b", 50)]
    new = [*old[:1], an_option("b", 45), an_option("c", 5)]
    for draw in range(0, DRAWS, DRAWS // 200):
        before, after = pick(old, draw), pick(new, draw)
        assert before is not None
        assert after is not None
        assert after.name in {before.name, "c"}


def test_a_binding_is_kept_while_its_target_is_meant_for_such_requests() -> None:
    route = a_route(an_option("a", 0), an_option("b"), an_option("gold", tiers=("gold",)))
    made = planned(route)
    assert made.first is not None
    assert (made.first.option.name, made.first.reason, made.first.at) == ("b", "weight", FIRST)
    assert made.open == ("a", "b")
    kept = made.bound("a").first
    assert kept is not None
    assert (kept.option.name, kept.reason) == ("a", "bound")
    assert made.bound("gold").first == made.first
    assert made.bound("gone").first == made.first


def test_one_target_is_nothing_to_draw() -> None:
    made = planned(a_route(an_option("a")), draw=DRAWS - 1)
    assert made.first is not None
    assert made.first.reason == "only"
    assert made.open == ("a",)


CONDITIONS = [
    ({"prompt_tokens_min": 10}, Facts(prompt_tokens=10), Facts(prompt_tokens=9)),
    ({"prompt_tokens_max": 10}, Facts(prompt_tokens=10), Facts(prompt_tokens=11)),
    ({"tiers": ("gold", "red")}, Facts(tier="red"), Facts(tier="blue")),
    ({"service_classes": ("batch",)}, Facts(service_class="batch"), NO_FACTS),
    ({"tags": {"a": "b"}}, Facts(tags={"a": "b", "c": "d"}), Facts(tags={"a": "c"})),
    ({"tools": True}, Facts(tools=True), NO_FACTS),
    ({"tools": False}, NO_FACTS, Facts(tools=True)),
    ({"images": True}, Facts(images=True), NO_FACTS),
    ({"images": False}, NO_FACTS, Facts(images=True)),
]


@pytest.mark.parametrize(("when", "yes", "no"), CONDITIONS)
def test_each_condition(when: dict[str, Any], yes: Facts, no: Facts) -> None:
    assert holds(Condition(**when), yes)
    assert not holds(Condition(**when), no)
    assert holds(Condition(), yes)
    assert holds(Condition(), no)


def test_a_condition_is_all_that_it_says() -> None:
    both = Condition(tiers=("gold",), tools=True)
    assert holds(both, Facts(tier="gold", tools=True))
    assert not holds(both, Facts(tier="gold"))


def test_a_request_that_no_target_is_meant_for_finds_no_model() -> None:
    refused = plan(a_route(an_option("a", tiers=("gold",))), NO_FACTS, 0)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.MODEL_NOT_FOUND
    weightless = plan(a_route(an_option("a", 0)), NO_FACTS, 0)
    assert isinstance(weightless, Refusal)
    assert weightless.code is Code.MODEL_NOT_FOUND


def test_a_prompt_too_long_for_every_target_is_a_cause_to_fall_back_for() -> None:
    wide = an_option("wide", prompt_tokens_min=11)
    spares = (
        Spare(on=("error",), option=an_option("no")),
        Spare(on=("context_window",), option=wide),
    )
    made = planned(
        a_route(an_option("a", prompt_tokens_max=10), spares=spares), Facts(prompt_tokens=11)
    )
    assert made.first is None
    step = made.after(FIRST, "context_window")
    assert step is not None
    assert (step.option.name, step.at, step.reason) == ("wide", 1, "context_window")
    assert too_long(made.facts).code is Code.CONTEXT_LENGTH


def seeing(name: str, *, images: bool = True, **when: Any) -> Option:
    model = ProviderModel(
        model="m",
        provider="acme",
        upstream=name,
        dialect="openai",
        context_tokens=100,
        max_output_tokens=0,
        created_ms=0,
        route_version=1,
        images=images,
    )
    return msgspec.structs.replace(an_option(name, **when), model=model)


SHOWN = Facts(images=True, image="messages[0].content[0].image_url")


def test_a_request_with_images_goes_to_targets_that_take_them_alone() -> None:
    route = a_route(an_option("ours", 99), seeing("blind", images=False), seeing("theirs"))
    for draw in range(0, DRAWS, DRAWS // 7):
        step = planned(route, SHOWN, draw).first
        assert step is not None
        assert (step.option.name, step.reason) == ("theirs", "only")
    assert planned(route).open == ("ours", "blind", "theirs")


def test_images_that_no_target_takes_are_a_cause_to_fall_back_for() -> None:
    spares = (
        Spare(on=CAUSES, option=an_option("ours")),
        Spare(on=("capacity",), option=seeing("busy")),
        Spare(on=("images",), option=seeing("theirs")),
    )
    made = planned(a_route(an_option("first"), spares=spares), SHOWN)
    assert (made.first, made.lacks) == (None, "images")
    step = made.after(FIRST, "images")
    assert step is not None
    assert step.option.name == "theirs"
    assert (made.refusal.code, made.refusal.param) == (Code.UNSUPPORTED, SHOWN.image)
    assert made.refusal.message == f"{SHOWN.image}: the model 'm' takes no images"


def test_of_images_and_length_the_one_that_is_missing_is_told() -> None:
    facts = msgspec.structs.replace(SHOWN, prompt_tokens=11)
    short = seeing("short", prompt_tokens_max=10)
    made = planned(a_route(an_option("ours"), short), facts)
    assert (made.first, made.lacks) == (None, "context_window")
    assert made.refusal.code is Code.CONTEXT_LENGTH
    made = planned(a_route(an_option("ours", prompt_tokens_max=10)), facts)
    assert made.lacks == "images"


spare_lists = st.lists(
    st.builds(
        lambda name, on, gold: Spare(
            on=tuple(on), option=an_option(name, tiers=("gold",) if gold else ())
        ),
        st.sampled_from("abcd"),
        st.sets(st.sampled_from(CAUSES), min_size=1),
        st.booleans(),
    ),
    max_size=6,
)


@given(spare_lists, st.lists(st.sampled_from(CAUSES), min_size=7, max_size=7))
def test_spares_come_in_their_order_for_their_causes_once_and_end(
    spares: list[Spare], causes: list[Any]
) -> None:
    made = planned(a_route(an_option("first"), spares=tuple(spares)))
    at, tried = FIRST, ["first"]
    for cause in causes:
        step = made.after(at, cause, tried)
        skipped = spares[at + 1 : step.at if step is not None else None]
        for spare in skipped:
            assert (
                cause not in spare.on
                or spare.option.name in tried
                or spare.option.target.when.tiers
            )
        if step is None:
            return
        assert step.at > at
        assert cause in spares[step.at].on
        assert step.option.name not in tried
        at = step.at
        tried.append(step.option.name)
    raise AssertionError("it did not end")


def test_what_began_before_anybody_bound_it_has_a_keeper_even_without_weight() -> None:
    kept = msgspec.structs.replace(
        an_option("old", 0), target=Target(deployment="old", weight=0, keeps_begun=True)
    )
    assert planned(a_route(an_option("new"), kept)).keeper == "old"
    assert planned(a_route(an_option("new"), an_option("old"))).keeper is None
