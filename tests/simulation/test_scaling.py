"""Autoscalers over traces in virtual time: promises kept, at what cost, how quietly."""

import msgspec
import pytest

from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.signals import Missing, Phase
from simulator.scaling import Concurrency, Ours, Threshold, clairvoyant_ms, run, turns
from simulator.scaling_fleet import Fleet, Machine
from simulator.scaling_traces import (
    SHAPES,
    Asked,
    bursts,
    diurnal,
    doubling,
    flat,
    idle_then,
    on_off,
)

MACHINE = Machine()
POLICY = ScalingPolicy(
    deployment="d",
    min_replicas=1,
    max_replicas=12,
    cold_start_prior_ms=60_000,
    replica_hour_micro=2_000_000,
)


def ours(trace, **changes):
    policy = msgspec.structs.replace(POLICY, **changes)
    scaler = Ours(policy)
    return run(trace, policy, scaler, MACHINE), scaler


@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("shape", ["flat", "doubling", "on_off", "bursts"])
def test_the_objective_is_kept_with_fewer_turns_than_a_threshold(shape, seed):
    trace = SHAPES[shape](seed)
    mine, _ = ours(trace)
    threshold = run(trace, POLICY, Threshold(POLICY), MACHINE)
    concurrency = run(trace, POLICY, Concurrency(POLICY), MACHINE)
    # A doubling in the time of a cold start is late for somebody, whoever decides.
    assert mine.in_time_settled >= (0.93 if shape == "doubling" else 0.95)
    assert mine.in_time_settled >= threshold.in_time_settled - 0.005
    assert mine.turns <= 2
    assert mine.turns < concurrency.turns
    if shape != "bursts":  # which one replica bears
        assert mine.replica_hours < threshold.replica_hours
        assert mine.turns < threshold.turns


def test_a_day_is_followed_without_flapping():
    trace = diurnal(1, days=2, day_s=3_600)
    mine, _ = ours(trace, season_ms=3_600_000)
    threshold = run(trace, POLICY, Threshold(POLICY), MACHINE)
    assert mine.in_time_settled >= 0.99
    assert mine.over < 1.0 < threshold.over
    assert mine.turns <= 6 < threshold.turns


def test_a_doubling_within_a_minute_is_seen_before_it_is_over():
    trace = doubling(3)
    mine, scaler = ours(trace)
    assert mine.in_time_settled >= 0.93
    before = max(decision.desired for decision in scaler.decisions[150:175])
    after = [decision.desired for decision in scaler.decisions[180:196]]
    assert max(after) > before  # within the minute and a quarter that it takes


def test_warm_replicas_shorten_what_cold_starts_make_late():
    trace = idle_then(1)
    cold, _ = ours(trace, min_replicas=0)
    warm, scaler = ours(trace, min_replicas=0, warm_replicas=2)
    assert warm.in_time > cold.in_time + 0.1
    assert any(decision.wake for decision in scaler.decisions)
    assert min(decision.desired for decision in scaler.decisions[100:280]) == 0


def test_the_budget_is_never_passed():
    mine, scaler = ours(flat(1), budget_hour_micro=4_500_000)
    assert mine.most == 2
    assert any("capped: the budget bears 2" in decision.reasons for decision in scaler.decisions)


@pytest.mark.parametrize("gone", ["arrived", "served", "queued_work", "wait_ms", "ttft_ms"])
def test_without_one_signal_the_objective_is_still_kept(gone):
    scaler = Ours(
        POLICY, lambda seen, _: msgspec.structs.replace(seen, **{gone: Missing("renamed")})
    )
    mine = run(flat(2, seconds=1_200), POLICY, scaler, MACHINE)
    assert mine.in_time_settled >= 0.95
    if gone != "ttft_ms":
        assert any(alarm.startswith(gone) for alarm in scaler.decisions[-1].alarms)


def test_one_mute_worker_changes_next_to_nothing():
    def mute(seen, _):
        first, *rest = seen.replicas
        unseen = msgspec.structs.replace(first, kv_use=Missing("x"), slots_use=Missing("x"))
        return msgspec.structs.replace(seen, replicas=(unseen, *rest))

    trace = flat(2, seconds=1_200)
    whole, _ = ours(trace)
    scaler = Ours(POLICY, mute)
    partly = run(trace, POLICY, scaler, MACHINE)
    assert partly.in_time_settled >= 0.95
    assert abs(partly.most - whole.most) <= 2


def test_a_clock_that_jumps_an_hour_and_back_turns_nothing():
    trace = flat(4, seconds=2_400)
    quiet, _ = ours(trace)

    class Jumping(Ours):
        def round(self, fleet, now_ms):
            return super().round(fleet, now_ms + (3_600_000 if 900_000 < now_ms < 1_200_000 else 0))

    jumped = run(trace, POLICY, Jumping(POLICY), MACHINE)
    assert jumped.in_time_settled >= 0.95
    assert jumped.turns <= quiet.turns + 1


def test_the_same_seed_is_the_same_story():
    for name in ("flat", "on_off", "bursts", "idle_then"):
        shape = SHAPES[name]
        assert shape(5)[:50] == shape(5)[:50] != shape(6)[:50]
    first, _ = ours(bursts(1))
    second, _ = ours(bursts(1))
    assert first == second


def test_a_fleet_serves_in_order_and_ends_what_it_took():
    fleet = Fleet(Machine(slots=1), 1)
    trace = (Asked(0, 80, 1), Asked(10, 80, 1), Asked(20, 80, 1))
    fleet.play(trace, 15, 0)
    fleet.scale_to(0)
    assert [one.phase for one in fleet.replicas] == [Phase.LEAVING]
    fleet.play(trace, 10_000, 2)
    assert fleet.first_tokens == [(0, 10.0)]
    assert fleet.replicas == []  # it left when the one that it had taken was done
    assert fleet.close() == 50  # prefill, and a step with all slots in use


def test_the_clairvoyant_needs_no_less_than_the_work():
    trace = on_off(1)
    least_ms = clairvoyant_ms(trace, POLICY, MACHINE, trace[-1].at_ms + 1)
    stays_ms = sum(MACHINE.stay_ms(asked, 1.0) for asked in trace)
    assert least_ms >= stays_ms / MACHINE.slots
    assert turns([1, 2, 2, 1, 3]) == 2
