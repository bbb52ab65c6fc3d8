"""A rollout from its first look to its end, and what evidence makes of it."""

from msgspec.structs import replace

from control_plane.rollouts import machine
from control_plane.rollouts.samples import Side, Window
from control_plane.rollouts.state import State
from core.route_table import Fallback, RouteTable, Target
from tests.support.rollout_world import (
    MUCH,
    TABLE,
    RolloutWorld,
    alone,
    side,
    stepping,
)


def test_a_good_canary_gets_5_then_50_then_all_and_the_stable_leaves_last():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    shares = []
    while not world.rollout.closed:
        world.look()
        shares.append(world.share())
    assert list(dict.fromkeys(shares)) == [0.05, 0.5, 1.0]
    assert [t.event for t in world.history] == [
        "started", "gates_open", "step_passed", "step_passed", "promoted", "warm_ended",
    ]  # fmt: skip
    assert world.rollout.state is State.PROMOTED
    assert world.table == replace(
        TABLE, targets=(Target(deployment="new"),), version=world.table.version
    )
    assert world.released == ["old"]
    assert world.writes == 4
    assert all(t.reasons for t in world.history)
    assert world.look() == machine.Decision(rollout=world.rollout)


def test_a_step_lasts_at_least_its_time_however_sure_the_verdict():
    world = stepping()
    world.canary = world.stable = side(MUCH)
    world.look()
    assert world.rollout.reasons == ("every gate that decides has passed; 10 s are left",)
    assert world.rollout.percent == 5
    world.look()
    assert world.rollout.percent == 50


def test_all_of_the_stable_stays_in_the_table_at_weight_0_until_it_ends():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    world.until(State.PROMOTING)
    assert world.table is not None
    assert [(t.deployment, t.weight) for t in world.table.targets] == [("old", 0), ("new", 1)]
    world.until(State.PROMOTED)
    assert [t.deployment for t in world.table.targets] == ["new"]


def test_what_is_worse_is_rolled_back_by_one_write_to_what_was_found():
    table = RouteTable(
        model="smol",
        targets=(Target(deployment="old", weight=30), Target(deployment="other", weight=70)),
        fallbacks=(Fallback(on=("error",), target=Target(deployment="spare")),),
        max_output_tokens=100,
        version=7,
    )
    world = RolloutWorld(table=table)
    world.canary = world.stable = side(300)
    world.until(State.STEPPING)
    world.canary = side(300, errors=0.4)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK
    assert world.writes == 2
    assert world.table == replace(table, version=world.table.version)
    (why,) = world.rollout.reasons
    assert why.startswith("error rate: canary 40.00% (")
    world.look()
    assert world.rollout.state is State.ROLLED_BACK
    assert world.released == ["new"]


def test_no_conclusion_within_the_time_of_a_step_pauses_and_a_resume_goes_on():
    world = stepping()
    world.until(State.PAUSED)
    assert world.rollout.pause == "inconclusive"
    assert world.rollout.reasons[0] == "step 1 has not been decided in 100 s"
    assert world.share() == 0.05
    look, began_ms = world.rollout.look, world.rollout.began_ms
    assert look == 2  # the last one is taken with all there is
    world.say("resume")
    world.look()
    assert (world.rollout.state, world.rollout.look) == (State.STEPPING, look)
    assert world.rollout.began_ms == began_ms
    world.canary = world.stable = side(MUCH)
    world.until_percent(50)


def test_the_last_look_may_pass():
    world = stepping()
    world.look(times=9)
    look = world.rollout.look
    world.canary = world.stable = side(399)  # too little for the next look to be due
    world.canary = side(399, errors=0.9)
    world.look()
    assert world.rollout.look == look + 1
    assert world.rollout.state is State.ROLLING_BACK


def test_missing_metrics_are_waited_for_and_then_paused_for():
    for missing in ("canary", "stable"):
        world = stepping()
        setattr(world, missing, None)
        world.look(times=3)
        assert world.rollout.reasons == ("there are no measurements of this step",)
        assert world.rollout.state is State.STEPPING
        world.until(State.PAUSED)
        assert world.rollout.reasons[1] == "there are no measurements of this step"


def test_measurements_of_another_window_or_that_cannot_be_true_are_none():
    world = stepping()
    look = world.rollout.look
    world.canary = side(MUCH, errors=0.9)
    world.window = Window(from_ms=1, to_ms=2)
    world.look()
    assert world.rollout.reasons == ("the measurements are of another window",)
    world.window = None
    world.canary = replace(world.canary, open=-1)
    world.look()
    assert world.rollout.reasons == ("the measurements cannot be true: canary: -1 open requests",)
    assert (world.rollout.state, world.rollout.look) == (State.STEPPING, look)


def test_too_few_requests_are_said_in_numbers():
    world = RolloutWorld()
    world.canary = side(12)
    world.until(State.STEPPING)
    world.look()
    assert world.rollout.reasons == (
        (
            "12 requests of the canary and 2000 of the stable have ended, 0 and 0 are open; "
            "200 of each are needed"
        ),
    )


def test_a_canary_on_which_every_request_hangs_is_rolled_back():
    world = stepping()
    world.stable = replace(side(3_000), open=150)
    world.canary = Side(open=600)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK
    (why,) = world.rollout.reasons
    assert why.startswith("requests still open: canary 100.00% (")


def test_a_name_has_one_rollout_at_a_time():
    world = RolloutWorld()
    world.busy_with = "ro_0"
    world.look(times=3)
    assert world.rollout.state is State.PENDING
    assert world.rollout.reasons == ("rollout ro_0 of smol has not ended",)
    world.busy_with = ""
    world.until(State.STEPPING)


def test_a_failure_against_an_earlier_time_is_left_to_people():
    world = alone()
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert (world.rollout.state, world.rollout.pause) == (State.PAUSED, "failed_alone")
    assert "at another time" in world.rollout.reasons[0]
    windows = world.rollout.windows
    world.look(times=3)
    world.say("resume")
    assert world.rollout.windows == windows + 1
    assert world.rollout.verdicts == ()
    world.canary = side(MUCH)
    world.until(State.PROMOTING)


def test_at_100_percent_the_stable_is_what_it_was_beside_the_canary():
    world = alone()
    world.canary = side(MUCH, slower=2.0)
    world.stable = side(300, slower=3.0)  # what is left of it: a few old conversations
    world.look()
    assert world.rollout.pause == "failed_alone"


def test_a_failure_against_an_earlier_time_rolls_back_if_so_ruled():
    world = alone(when_alone="roll_back")
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_errors_roll_back_at_any_time():
    world = alone()
    world.canary = side(MUCH, errors=0.2)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_a_pause_still_watches_over_what_has_weight():
    world = stepping()
    world.say("pause", why="lunch")
    assert world.rollout.reasons == ("an operator's word: lunch",)
    world.look(times=20)
    assert world.rollout.state is State.PAUSED
    assert world.rollout.reasons == ("an operator's word: lunch",)
    world.canary = world.stable = side(MUCH)
    world.look(times=20)
    assert (world.rollout.state, world.rollout.percent) == (State.PAUSED, 5)
    world.canary = side(4 * MUCH, errors=0.5)
    world.stable = side(4 * MUCH)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_a_pause_rolls_back_a_canary_that_is_gone_but_not_an_edited_table():
    world = stepping()
    world.say("pause")
    world.new = ()
    world.look(times=3)
    assert world.rollout.state is State.ROLLING_BACK
    world = stepping()
    world.say("pause")
    world.new = ()
    world.edit(max_output_tokens=5)
    world.look(times=9)
    assert world.rollout.state is State.PAUSED


def test_a_failure_alone_while_paused_stays_resumable():
    world = alone()
    world.say("pause")
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert (world.rollout.pause, world.rollout.resumes) == ("failed_alone", State.STEPPING)
