"""What the invariants say at the moment something wrong happens."""

import pytest

from core.protocol import Choice, Generate
from simulator.config import WorldConfig
from simulator.invariants import InvariantError
from simulator.world import World
from tests.support.simulated_orders import served


@pytest.fixture
def world():
    world = World(WorldConfig(seed=1))
    order, _ = served()
    order.attempts.clear()
    world.orders.add(order)
    yield world
    world.cast.stop()


def generate(world, attempt=1, output_ids=()):
    order = world.orders.all["r1"]
    return Generate(
        request_id="r1",
        attempt=attempt,
        version="v",
        prompt_ids=order.prompt,
        choices=(Choice(index=0, output_ids=output_ids),),
        sampling=order.sampling,
        tenant_salt=order.profile.salt,
    )


def test_a_step_after_the_deadline(world):
    judge, now_ms = world.cast.invariants, world.clock.now_ms
    judge.planned(("r1", 1), now_ms + 1)
    with pytest.raises(InvariantError, match="served after its deadline"):
        judge.planned(("r1", 1), now_ms)


def test_an_attempt_number_used_twice(world):
    judge = world.cast.invariants
    judge.accepted(generate(world), "w")
    with pytest.raises(InvariantError, match="attempt reused"):
        judge.accepted(generate(world), "w")


def test_an_answer_resumed_from_other_tokens(world):
    judge = world.cast.invariants
    with pytest.raises(InvariantError, match="from other tokens"):
        judge.accepted(generate(world, output_ids=(63,)), "w")


def test_another_token_and_one_too_many(world):
    judge, expected = world.cast.invariants, world.orders.all["r1"].expected[0]
    judge.accepted(generate(world, output_ids=tuple(expected[:2])), "w")
    for token in expected[2:]:
        judge.produced(("r1", 1), 0, token)
    with pytest.raises(InvariantError, match="goes on after its end"):
        judge.produced(("r1", 1), 0, 1)
    judge.accepted(generate(world, attempt=2), "w")
    with pytest.raises(InvariantError, match=f"alone it is {expected[0]}"):
        judge.produced(("r1", 2), 0, expected[0] + 1)


def test_a_prefix_that_its_tenant_never_sent(world):
    judge = world.cast.invariants
    judge.accepted(generate(world), "w")
    judge.started(("r1", 1), 0)
    with pytest.raises(InvariantError, match="never sent"):
        judge.started(("r1", 1), 2)


def test_a_prefix_that_an_earlier_attempt_sent(world):
    judge = world.cast.invariants
    judge.accepted(generate(world), "w")
    judge.accepted(generate(world, attempt=2), "w")
    judge.started(("r1", 2), 2)
