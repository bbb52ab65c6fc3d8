"""Complaints about canaries elsewhere (control_plane.md, 2.10 and 4), each by its symptom."""

from msgspec.structs import replace

from control_plane.rollouts.state import State
from core.fleet import ReplicaState
from core.registry import ServedModel
from core.route_table import Target
from gateway.route_index import Option
from gateway.route_plan import pick
from tests.support.rollout_world import TICK_MS, RolloutWorld, replicas, side

SERVED = ServedModel(
    model="smol",
    version="v",
    deployment="new",
    pool="new@local",
    family="llama",
    context_tokens=100,
    max_output_tokens=0,
    created_ms=0,
    route_version=1,
)


def test_canary_takes_traffic_before_it_is_ready_while_stable_is_shrunk():
    """kserve #5983: 503s while a canary loaded for a minute."""
    world = RolloutWorld()
    for state in (ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.WARMING):
        world.new = replicas("new", 2, state)
        decision = world.look(times=3)
        assert (world.writes, world.share()) == (0, None)
        assert decision.wanted[0].deployment == "old"
        assert decision.wanted[0].replicas == 2  # the stable is not shrunk
    world.new = replicas("new", 2)
    world.look()
    assert world.share() == 0.05


def test_not_a_number_or_no_data_is_read_as_success():
    """Argo: a query that returns NaN has to be handled by who writes the condition."""
    world = RolloutWorld()
    world.canary = side(0)
    world.look(times=8)
    assert (world.rollout.state, world.rollout.percent) == (State.STEPPING, 5)
    world.until(State.PAUSED)
    assert world.rollout.pause == "inconclusive"


def test_one_failed_check_by_chance_rolls_back():
    """Argo's failureLimit is 0, Flagger counts failed checks: both stop good canaries by luck."""
    world = RolloutWorld()
    world.stable = side(2000, errors=0.0)
    world.canary = side(200, errors=0.03)  # three times what is tolerated, and six requests
    world.look(times=5)
    assert world.rollout.state is State.STEPPING


def test_a_rollback_takes_as_many_writes_as_there_were_steps():
    world = RolloutWorld()
    world.canary = world.stable = side(8_000)
    world.until(State.PROMOTING)
    writes = world.writes
    world.say("rollback")
    assert world.writes == writes + 1
    assert [t.deployment for t in world.table.targets] == ["old"]


def test_weights_shifted_back_by_hand_are_shifted_forth_again():
    """A controller that fights an operator over the table."""
    world = RolloutWorld()
    world.canary = world.stable = side(300)
    world.until(State.STEPPING)
    world.edit(targets=(Target(deployment="old", weight=1), Target(deployment="new", weight=0)))
    world.look(times=30)
    assert (world.rollout.state, world.share()) == (State.PAUSED, 0)


def test_a_larger_share_moves_conversations_off_the_canary():
    """Without any memory of bindings, a draw that went to the canary still does."""
    world = RolloutWorld()
    world.canary = world.stable = side(8_000)
    canaries: set[int] = set()
    for percent in (5, 50, 100):
        world.until_percent(percent)
        options = tuple(Option(target=t, model=SERVED) for t in world.table.targets)
        drawn = {at for at in range(200) if pick(options, at, 200).name == "new"}
        assert canaries <= drawn
        assert len(drawn) == 2 * percent
        canaries = drawn


def test_a_stalled_clock_or_a_long_pause_of_the_controller_counts_as_evidence():
    """A control plane that was away for an hour has not watched for an hour."""
    world = RolloutWorld()
    world.canary = world.stable = side(8_000)
    world.until(State.STEPPING)
    world.look(passed_ms=3_600_000)
    assert world.rollout.percent == 5
    assert world.rollout.held_ms == TICK_MS


def test_ready_replicas_of_other_weights_under_the_same_name_are_counted():
    """AIBrix #235: reported running, and silently another model answers."""
    world = RolloutWorld()
    world.new = (*replicas("new", 1), replace(replicas("new", 1)[0], name="n9", version="v-bad"))
    world.look(times=3)
    assert world.rollout.state is State.STAGING
    assert "n9 serves version v-bad, not v-new" in world.rollout.reasons
