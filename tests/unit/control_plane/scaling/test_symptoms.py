"""What users of other autoscalers complained about, each named after its symptom."""

import msgspec

from control_plane.scaling.decide import decide
from control_plane.scaling.policy import rival
from control_plane.scaling.signals import Missing, Observed, ReplicaSignal
from control_plane.scaling.state import State
from tests.unit.control_plane.scaling.cases import (
    ROUND_MS,
    START_MS,
    a_look,
    a_policy,
    blind,
    replicas,
    rounds,
    settled,
)


def test_one_worker_without_metrics_does_not_stop_the_scaler():
    """AIBrix #617, #1661, #436: one pod that is not ready broke the collection of all."""
    policy = a_policy()
    state = settled(policy, 2_000, 3)
    mute = ReplicaSignal(replica="mute", phase=replicas(1)[0].phase)
    seen = a_look(ready=3, work=2_000, arrived=Observed(6_000), served=Observed(3_000))
    seen = msgspec.structs.replace(seen, replicas=(*seen.replicas, mute))
    decision = decide(policy, state, seen, state.wall_ms + ROUND_MS)
    assert decision.desired == 10
    assert "kv_use unknown of 1 in 4 replicas" in decision.alarms


def test_two_policies_on_one_target_are_rivals():
    """AIBrix #617: two scalers on one target fight."""
    mine, whole = a_policy(deployment="d"), a_policy(deployment="", model="m")
    other = a_policy(deployment="e")
    assert rival(mine, [whole], "m") == "model:m"
    assert rival(whole, [mine], "m") == "deployment:d"
    assert rival(mine, [other, mine], "m") is None


def test_a_renamed_metric_raises_an_alarm_and_is_not_an_idle_replica():
    """GAIE P1905, production-stack #617, AIBrix P2057: a gauge that was renamed read as 0 %."""
    policy = a_policy()
    state = settled(policy, 4_400, 6)
    renamed = msgspec.structs.replace(
        a_look(ready=6, work=0.0),
        replicas=tuple(
            msgspec.structs.replace(one, kv_use=Missing("no such gauge")) for one in replicas(6)
        ),
    )
    told = rounds(policy, state, lambda _: renamed, 300, state.wall_ms)
    assert {decision.desired for decision in told} == {6}
    assert told[-1].reasons == ("stays at 6: KV use cannot be seen",)
    assert "kv_use unknown of 6 in 6 replicas" in told[-1].alarms


def test_scale_to_zero_does_not_kill_a_model_that_is_still_loading():
    """superlinked/sie #293: it went to zero while its only replica was loading."""
    policy = a_policy(min_replicas=0, start_timeout_ms=3_600_000)
    waiting = a_look(ready=0, queued=1)
    woken = decide(policy, State(), waiting, START_MS)
    assert (woken.desired, woken.start) == (1, 1)
    # The client gave up; the load takes half an hour, longer than every window.
    loading = a_look(ready=0, replicas=replicas(0, 1))
    told = rounds(policy, woken.state, lambda _: loading, 360, woken.state.wall_ms)
    assert {decision.desired for decision in told} == {1}
    idle = rounds(policy, told[-1].state, lambda _: a_look(ready=1), 200, told[-1].state.wall_ms)
    assert idle[-1].desired == 0


def test_a_start_that_never_ends_is_counted_lost_and_replaced_with_growing_pauses():
    policy = a_policy(min_replicas=2)
    stuck = a_look(ready=1, replicas=replicas(1, 1, coming_ms=policy.start_timeout_ms + 1))
    first = decide(policy, State(), stuck, START_MS)
    assert (first.desired, first.start, first.lost) == (3, 1, ("r1",))
    assert "lost: 1 not ready after 600 s" in first.alarms
    # The one in its place gets stuck too: now the pauses grow.
    worse = a_look(ready=1, replicas=replicas(1, 2, coming_ms=policy.start_timeout_ms + 1))
    told = rounds(policy, first.state, lambda _: worse, 60, START_MS + ROUND_MS)
    raised = [place for place, decision in enumerate(told) if decision.desired == 4]
    assert raised[0] == 5  # not before half a minute
    assert told[-1].state.failures == 2
    assert told[-1].state.retry_ms - told[raised[0]].state.elapsed_ms == 60_000
    well = decide(policy, told[-1].state, a_look(ready=2), told[-1].state.wall_ms + 1)
    assert (well.desired, well.state.failures, well.stop) == (2, 0, 0)


def test_streams_that_hardly_say_anything_do_not_pin_the_count():
    """ray #61551: pinned at 2 long after the work was over, by counts of open streams."""
    policy = a_policy()
    busy = settled(policy, 1_400, 2)
    assert busy.target == 2
    # One stream is open on each for ever, and says a token now and then.
    trickle = a_look(ready=2, work=2.0)
    told = rounds(
        policy, busy, lambda last: trickle if not last or last.desired == 2 else a_look(), 200
    )
    assert told[-1].desired == 1


def test_counts_that_nobody_updates_any_more_are_stale_and_not_work():
    """ray #61551 again: what a dead reporter last said is nobody's load."""
    policy = a_policy()
    state = settled(policy, 1_400, 2)
    old = a_look(ready=2, arrived=Observed(1_400, 10**6), served=Observed(0.0))

    def look(last):
        return old if last is None or last.desired == 2 else a_look()

    told = rounds(policy, state, look, 400, state.wall_ms)
    assert told[0].alarms == ("arrived stale (1000 s old)",)
    assert told[-1].desired == 1


def test_a_deployment_at_zero_wakes_with_the_first_request_that_waits():
    policy = a_policy(min_replicas=0)
    state = decide(policy, State(), a_look(ready=0), START_MS).state
    batch = a_look(ready=0, queued_any=Observed(1))
    for seen in (a_look(ready=0, queued=1), batch, a_look(ready=0, arrived=Observed(5.0))):
        decision = decide(policy, state, seen, START_MS + ROUND_MS)
        assert (decision.desired, decision.start) == (1, 1)


def test_at_zero_and_blind_one_is_started():
    policy = a_policy(min_replicas=0)
    unseen = blind(a_look(ready=0), "queued", "queued_any", "arrived", "served")
    decision = decide(policy, State(), unseen, START_MS)
    assert decision.desired == 1
    assert decision.reasons[0].startswith("blind: 1 needed")


def test_missing_signals_fall_back_in_their_order_and_are_told():
    policy = a_policy(work_rate_prior=0, min_replicas=1)
    seen = a_look(ready=2, wait_ms=Observed(3_000), queued=9)
    # Without what arrives, what is served; without a rate, the wait; without that, KV.
    unarrived = decide(policy, State(), blind(seen, "arrived"), START_MS)
    assert unarrived.desired == 4
    assert unarrived.reasons[0].startswith("wait: 4 needed: a wait of 3000 ms")
    assert "arrived missing (renamed)" in unarrived.alarms
    full = blind(
        a_look(ready=2, replicas=replicas(2, used=1.0)),
        *("arrived", "served", "queued", "queued_any", "queued_work", "wait_ms", "ttft_ms"),
    )
    told = rounds(policy, State(), lambda _: full, 10)
    assert told[-1].desired == 3
    assert "kv: 3 needed: 100% of KV in use, 85% is the ceiling" in {d.reasons[0] for d in told}
    nothing = blind(
        a_look(ready=2),
        *("arrived", "served", "queued", "queued_any", "queued_work", "wait_ms", "ttft_ms"),
    )
    held = rounds(policy, State(), lambda _: nothing, 300)
    assert {decision.desired for decision in held} == {2}
    assert held[-1].reasons == ("stays at 2: arriving work and the queue cannot be seen",)


def test_first_tokens_alone_still_raise():
    policy = a_policy(work_rate_prior=0)
    slow = a_look(ready=2, ttft_ms=Observed(9_000.0))
    slow = blind(slow, "arrived", "served", "queued", "queued_any", "queued_work", "wait_ms")
    slow = msgspec.structs.replace(
        slow,
        replicas=tuple(msgspec.structs.replace(r, slots_use=Missing("gone")) for r in replicas(2)),
    )
    told = rounds(policy, State(), lambda _: slow, 20)
    assert told[-1].desired == 3
    assert told[-1].reasons[0] == "stays at 3: arriving work and the queue cannot be seen"
