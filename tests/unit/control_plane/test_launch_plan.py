"""How many replicas there are: what a round decides from what is wanted and what is seen."""

import msgspec
import pytest

from control_plane.launchers.actions import (
    Adopt,
    Ask,
    AskStop,
    Drain,
    Fail,
    Forget,
    PlanRules,
    Seen,
    Settle,
    Start,
    Stop,
    Wake,
    Wanted,
)
from control_plane.launchers.life import LifeRules, Replica
from control_plane.launchers.plan import plan, shortfalls
from core.fleet import ReplicaState
from core.launch import Launch, Place
from core.worker_spec import LauncherKind

NOW_MS = 10_000_000
HOME = "abcdef0123456789"
RULES = PlanRules(
    life=LifeRules(stalled_ms=1000, start_ms=5000),
    drain_ms=600,
    places_max=4,
    retry_first_ms=100,
    retry_max_ms=1000,
    stable_ms=2000,
    away_ms=50_000,
)


def name(number):
    return f"smol-a-abcdef-{number}"


def a_replica(number=0, **changes):
    fields = {
        "replica_id": name(number),
        "deployment": "smol-a",
        "state": ReplicaState.READY,
        "started_ms": NOW_MS - 1000 - number,
        "ready_ms": NOW_MS - 900,
    }
    return Replica(**(fields | changes))


def a_launch(number=0, **changes):
    fields = {
        "replica_id": name(number),
        "deployment": "smol-a",
        "launcher": LauncherKind.LOCAL,
        "home": HOME,
        "asked_ms": NOW_MS - 1100,
        "started_ms": NOW_MS - 1000,
    }
    return Launch(**(fields | changes))


def a_place(number=0, *, alive=True, **changes):
    return Place(**({"replica_id": name(number), "alive": alive} | changes))


def wanting(replicas=1, **changes):
    fields = {"deployment": "smol-a", "launcher": LauncherKind.LOCAL}
    return [Wanted(replicas=replicas, **(fields | changes))]


def decided(wanted, *, replicas=(), launches=(), places=(), home=HOME):
    seen = Seen(replicas=tuple(replicas), launches=tuple(launches), places=tuple(places), home=home)
    return plan(wanted, seen, now_ms=NOW_MS, rules=RULES)


def kinds(actions):
    return [(type(action), action.replica_id) for action in actions]


def running(*numbers, **changes):
    return {
        "replicas": [a_replica(number, **changes) for number in numbers],
        "launches": [a_launch(number) for number in numbers],
        "places": [a_place(number) for number in numbers],
    }


# Too few.


def test_what_is_missing_is_asked_for_with_the_reason():
    actions = decided(wanting(2))
    assert kinds(actions) == [(Ask, name(0)), (Ask, name(1))]
    assert {action.reason for action in actions} == {"there are 0, and 2 are wanted"}
    assert {action.deployment for action in actions} == {"smol-a"}


def test_what_is_asked_for_is_started_and_not_asked_for_twice():
    [action] = decided(wanting(1), launches=[a_launch(started_ms=None)])
    assert kinds([action]) == [(Start, name(0))]
    assert action.reason == "it is wanted"


def test_enough_is_left_alone():
    assert decided(wanting(2), **running(0, 1)) == []


def test_a_slow_start_is_never_asked_for_twice():
    # From the launch to the first beat nothing is heard of it; then it loads for minutes.
    assert decided(wanting(1), launches=[a_launch()], places=[a_place()]) == []
    loading = running(0, state=ReplicaState.LOADING, ready_ms=None)
    assert decided(wanting(1), **loading) == []


def test_a_sleeping_one_is_woken_before_another_is_started():
    asleep = a_replica(0, state=ReplicaState.SLEEPING)
    seen = {"replicas": [asleep], "launches": [a_launch()], "places": [a_place()]}
    assert kinds(decided(wanting(1), **seen)) == [(Wake, name(0))]
    assert kinds(decided(wanting(2), **seen)) == [(Wake, name(0)), (Ask, name(1))]
    assert decided(wanting(0, warm=1), **seen) == [], "the warm pool stays"


def test_no_more_are_started_than_there_is_room_for():
    assert len(decided(wanting(9))) == RULES.places_max
    leaving = [a_launch(n, stop_reason="x", stop_asked_ms=NOW_MS, stop_grace_ms=9) for n in (0, 1)]
    seen = {
        "launches": leaving,
        "places": [a_place(0), a_place(1)],
        "replicas": [a_replica(n, drain_deadline_ms=NOW_MS + 9) for n in (0, 1)],
    }
    assert kinds(decided(wanting(9), **seen)) == [(Ask, name(2)), (Ask, name(3))]


def test_an_id_that_somebody_else_runs_is_not_taken():
    other = a_replica(0, deployment="other")
    assert kinds(decided(wanting(1), replicas=[other])) == [(Ask, name(1))]
    gone = a_replica(0, deployment="other", state=ReplicaState.STOPPED)
    assert kinds(decided(wanting(1), replicas=[gone])) == [(Ask, name(0))]


def test_an_id_is_made_of_what_a_worker_may_be_called():
    [action] = decided(wanting(1, deployment="smol.a"))
    assert action.replica_id == "smol_a-abcdef-0"


@pytest.mark.parametrize("changes", [{"launcher": LauncherKind.EXTERNAL}, {"replicas": None}])
def test_where_nobody_starts_them_or_counts_them_none_is_started(changes):
    fields = {"replicas": 3} | changes
    assert decided(wanting(**fields)) == []


def test_without_a_launcher_in_reach_none_is_started():
    assert decided(wanting(1), home="") == []


# Too many.


def test_the_least_busy_and_newest_leave_first_and_those_not_ready_before_all():
    busy = [(0, 5), (1, 0), (2, 0)]
    seen = {
        "replicas": [
            *(a_replica(n, busy=b, started_ms=NOW_MS - 500 + n) for n, b in busy),
            a_replica(3, state=ReplicaState.LOADING, ready_ms=None),
        ],
        "launches": [a_launch(n) for n in range(4)],
        "places": [a_place(n) for n in range(4)],
    }
    left = [
        [a.replica_id for a in decided(wanting(want), **seen) if isinstance(a, AskStop)]
        for want in (3, 2, 1, 0)
    ]
    order = [name(3), name(2), name(1), name(0)]
    assert left == [order[:count] for count in (1, 2, 3, 4)]


def test_one_that_serves_is_drained_and_has_its_time_and_one_that_loads_has_none():
    drain, stop = decided(wanting(0), **running(0))
    assert isinstance(drain, Drain)
    assert (drain.within_ms, stop.grace_ms) == (RULES.drain_ms, RULES.drain_ms)
    drain, stop = decided(wanting(0), **running(0, state=ReplicaState.LOADING, ready_ms=None))
    assert (drain.within_ms, stop.grace_ms) == (0, 0)


def test_one_that_became_ready_after_it_was_asked_to_stop_is_drained_first():
    asked = a_launch(stop_reason="x", stop_asked_ms=NOW_MS - 9, stop_grace_ms=0)
    seen = {"launches": [asked], "places": [a_place()]}
    [action] = decided(wanting(0), replicas=[a_replica()], **seen)
    assert (type(action), action.within_ms) == (Drain, RULES.drain_ms)
    drained = a_replica(drain_deadline_ms=NOW_MS + 1)
    assert decided(wanting(0), replicas=[drained], **seen) == []


def test_one_that_somebody_else_starts_is_drained_alone():
    [action] = decided(wanting(0), replicas=[a_replica()])
    assert kinds([action]) == [(Drain, name(0))]
    [action] = decided(wanting(0), replicas=[a_replica(state=ReplicaState.WARMING)])
    assert action.within_ms == 0


def test_one_that_drains_already_is_not_counted_and_not_asked_again():
    leaving = a_replica(0, drain_deadline_ms=NOW_MS + 5, drain_reason="x")
    assert decided(wanting(1), replicas=[leaving, a_replica(1)]) == []


# Leaving.


@pytest.mark.parametrize("busy", [0, 3])
def test_a_stop_waits_for_its_drain_and_no_longer(busy):
    replica = a_replica(busy=busy, state=ReplicaState.DRAINING)
    seen = {"replicas": [replica], "places": [a_place()]}
    early = a_launch(stop_reason="x", stop_asked_ms=NOW_MS - 99, stop_grace_ms=100)
    assert decided(wanting(0), launches=[early], **seen) == []
    late = msgspec.structs.replace(early, stop_grace_ms=99)
    [action] = decided(wanting(0), launches=[late], **seen)
    assert (type(action), action.reason) == (Stop, "x; its time is over")


def test_what_has_nothing_to_finish_is_stopped_at_once():
    asked = a_launch(stop_reason="x", stop_asked_ms=NOW_MS, stop_grace_ms=10**6)
    for replicas in (
        [],  # it never registered
        [a_replica(state=ReplicaState.STOPPED)],
        [a_replica(busy=1, stalled_ms=1001)],
    ):
        [action] = decided(wanting(0), launches=[asked], places=[a_place()], replicas=replicas)
        assert (type(action), action.reason) == (Stop, "x")


def test_what_has_ended_is_forgotten():
    asked = a_launch(stop_reason="x", stop_asked_ms=NOW_MS, stop_grace_ms=0)
    for places in ([], [a_place(alive=False)]):
        assert kinds(decided(wanting(0), launches=[asked], places=places)) == [(Forget, name(0))]


def test_a_machine_that_is_taken_back_is_replaced_at_once():
    # A spot notice: the worker tells its own drain, and has two minutes.
    leaving = running(0, drain_deadline_ms=NOW_MS + 120, drain_reason="taken back")
    stop, ask = decided(wanting(1), **leaving)
    assert (type(stop), stop.reason, stop.grace_ms) == (AskStop, "taken back", 120)
    assert kinds([ask]) == [(Ask, name(1))]
    unbounded = running(0, state=ReplicaState.DRAINING)
    stop, _ = decided(wanting(1), **unbounded)
    assert stop.grace_ms == RULES.drain_ms


def test_a_deployment_that_drains_keeps_nobody_and_brings_nobody_back():
    drain, stop = decided(wanting(3, draining=True), **running(0))
    assert (type(drain), type(stop)) == (Drain, AskStop)
    assert stop.reason == "its deployment drains"
    [drain] = decided(wanting(None, draining=True), replicas=[a_replica()])
    assert isinstance(drain, Drain)


# Ended, stuck, never come.


def test_one_that_ends_is_started_again_after_a_pause_that_doubles_up_to_a_bound():
    pauses = []
    for failures in (0, 1, 2, 3, 4, 99):
        launch = a_launch(failures=failures)
        place = a_place(alive=False, ended="ended with -9")
        [action] = decided(wanting(1), launches=[launch], places=[place], replicas=[a_replica()])
        assert (type(action), action.reason) == (Fail, "ended with -9")
        pauses.append(action.retry_in_ms)
    assert pauses == [100, 200, 400, 800, 1000, 1000]
    [action] = decided(wanting(1), launches=[a_launch()])
    assert action.reason == "its process is gone"


def test_the_pause_is_waited_for():
    failed = a_launch(started_ms=None, failures=1, last_failure="ended with 7")
    waiting = msgspec.structs.replace(failed, retry_ms=NOW_MS + 1)
    assert decided(wanting(1), launches=[waiting]) == []
    [action] = decided(wanting(1), launches=[msgspec.structs.replace(failed, retry_ms=NOW_MS)])
    assert (type(action), action.reason) == (Start, "again, after: ended with 7")


def test_a_long_life_clears_the_failures_before_it():
    young = [a_launch(failures=3)]
    assert decided(wanting(1), **running(0) | {"launches": young}) == []
    old = [a_launch(failures=3, started_ms=NOW_MS - 2001)]
    assert kinds(decided(wanting(1), **running(0) | {"launches": old})) == [(Settle, name(0))]


def test_one_without_progress_is_stopped_to_be_started_again():
    [action] = decided(wanting(1), **running(0, busy=2, stalled_ms=1001))
    assert (type(action), action.reason) == (Stop, "no step for 1 s with 2 requests")


def test_health_is_not_false_during_a_long_prefill():
    # sglang #22511, rllm #926: twenty seconds of prefill evicted a worker. Its steps go on.
    assert decided(wanting(1), **running(0, busy=1, stalled_ms=999)) == []
    # Nor does a compile within the bound, or a port that answers nobody meanwhile.
    assert decided(wanting(1), **running(0, busy=1, stalled_ms=900, silent_ms=900)) == []


def test_one_that_somebody_else_runs_and_is_stuck_is_told_to_end():
    stuck = a_replica(7, busy=2, stalled_ms=1001)
    [action] = decided(wanting(None), replicas=[stuck])
    assert (type(action), action.within_ms) == (Drain, 0)
    slow = a_replica(7, state=ReplicaState.LOADING, ready_ms=None, started_ms=NOW_MS - 9999)
    assert decided(wanting(None), replicas=[slow]) == [], "it has nothing to end"


def test_one_that_never_registers_is_stopped_after_its_time():
    young, old = a_launch(started_ms=NOW_MS - 5000), a_launch(started_ms=NOW_MS - 5001)
    assert decided(wanting(1), launches=[young], places=[a_place()]) == []
    [action] = decided(wanting(1), launches=[old], places=[a_place()])
    assert (type(action), action.reason) == (Stop, "it has not registered 5 s after its start")


def test_the_row_of_an_older_life_says_nothing_of_the_new_one():
    # It was stuck, was ended and started again under its id; nothing was heard of it since.
    row = a_replica(busy=2, stalled_ms=9999, silent_ms=1001)
    assert decided(wanting(1), **running(0) | {"replicas": [row]}) == []


def test_a_lost_one_whose_process_goes_on_is_ended_but_not_rashly():
    assert decided(wanting(1), **running(0, state=ReplicaState.LOST, silent_ms=900)) == []
    old = {"launches": [a_launch(started_ms=NOW_MS - 4000)]}
    lost = running(0, state=ReplicaState.LOST, silent_ms=1001) | old
    [action] = decided(wanting(1), **lost)
    assert (type(action), action.reason) == (Stop, "it is lost, and its process goes on")


# After a crash of ours.


def test_a_crash_between_start_and_record_is_adopted():
    launch = a_launch(started_ms=None, retry_ms=NOW_MS + 9)
    [action] = decided(wanting(1), launches=[launch], places=[a_place()])
    assert kinds([action]) == [(Adopt, name(0))]


def test_a_place_that_nobody_asked_for_is_stopped_then_forgotten():
    [action] = decided(wanting(0), places=[a_place()])
    assert (type(action), action.reason) == (Stop, "nobody asked for it")
    assert kinds(decided(wanting(0), places=[a_place(alive=False)])) == [(Forget, name(0))]


def test_one_that_nobody_asked_for_costs_none_that_is_wanted_its_place():
    seen = running(0) | {"places": [a_place(0), a_place(1)]}
    seen["replicas"] = [a_replica(0), a_replica(1)]
    assert kinds(decided(wanting(1), **seen)) == [(Stop, name(1))]


# Another machine's.


def test_what_another_machine_launched_counts_and_is_left_to_it():
    far = a_launch(5, home="far", started_ms=None)
    assert decided(wanting(1), launches=[far]) == [], "it is coming"
    late = msgspec.structs.replace(far, asked_ms=NOW_MS - 5001)
    assert kinds(decided(wanting(1), launches=[late])) == [(Ask, name(0))]
    there = msgspec.structs.replace(far, started_ms=NOW_MS - 1000)
    assert decided(wanting(1), launches=[there], replicas=[a_replica(5)]) == []
    lost = a_replica(5, state=ReplicaState.LOST)
    assert kinds(decided(wanting(1), launches=[there], replicas=[lost])) == [(Ask, name(0))]


def test_what_another_machine_launched_may_be_asked_to_stop():
    there = a_launch(5, home="far")
    actions = decided(wanting(0), launches=[there], replicas=[a_replica(5)])
    assert kinds(actions) == [(Drain, name(5)), (AskStop, name(5))]


def test_a_launcher_that_is_out_of_reach_for_long_is_given_up():
    far = a_launch(5, home="far", asked_ms=NOW_MS - 60_000)
    assert kinds(decided(wanting(0), launches=[far])) == [(Forget, name(5))]
    silent = a_replica(5, state=ReplicaState.LOST, silent_ms=50_001)
    [action] = decided(wanting(0), launches=[far], replicas=[silent])
    assert action.reason == "its launcher far has been out of reach"
    heard = msgspec.structs.replace(silent, silent_ms=50_000)
    assert decided(wanting(0), launches=[far], replicas=[heard]) == []


# For a metric.


def test_a_shortfall_is_what_does_not_serve():
    seen = Seen(
        replicas=(
            a_replica(0),
            a_replica(1, busy=1, stalled_ms=600),
            a_replica(2, state=ReplicaState.LOADING),
        )
    )
    wanted = [
        *wanting(4),
        *wanting(None, deployment="b"),
        *wanting(1, deployment="c", draining=True),
    ]
    assert shortfalls(wanted, seen, rules=RULES) == {"smol-a": 2}
    assert shortfalls(wanting(1), seen, rules=RULES) == {"smol-a": 0}
