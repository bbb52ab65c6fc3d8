"""What a replica is good for: progress, not an open port."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.launchers.life import Condition, LifeRules, Replica, judge
from core.fleet import ReplicaState

RULES = LifeRules(stalled_ms=1000, start_ms=5000)
NOW_MS = 1_000_000


def a_replica(**changes):
    fields = {
        "replica_id": "rep-0",
        "deployment": "smol-a",
        "state": ReplicaState.READY,
        "started_ms": NOW_MS - 100,
    }
    return Replica(**(fields | changes))


def condition(**changes):
    return judge(a_replica(**changes), now_ms=NOW_MS, rules=RULES).condition


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Condition.SERVING),
        ({"state": ReplicaState.STARTING}, Condition.COMING),
        ({"state": ReplicaState.LOADING}, Condition.COMING),
        ({"state": ReplicaState.WARMING}, Condition.COMING),
        ({"state": ReplicaState.SLEEPING}, Condition.ASLEEP),
        ({"state": ReplicaState.DRAINING}, Condition.LEAVING),
        ({"drain_deadline_ms": NOW_MS + 1, "drain_reason": "x"}, Condition.LEAVING),
        ({"state": ReplicaState.STOPPED, "drain_deadline_ms": 1}, Condition.GONE),
        ({"state": ReplicaState.LOST}, Condition.GONE),
        ({"busy": 1, "stalled_ms": 500}, Condition.SERVING),
        ({"busy": 1, "stalled_ms": 501}, Condition.SUSPECT),
        ({"busy": 1, "stalled_ms": 1000}, Condition.SUSPECT),
        ({"busy": 1, "stalled_ms": 1001}, Condition.STUCK),
        ({"state": ReplicaState.LOADING, "started_ms": NOW_MS - 5000}, Condition.COMING),
        ({"state": ReplicaState.LOADING, "started_ms": NOW_MS - 5001}, Condition.STUCK),
        ({"state": ReplicaState.LOADING, "started_ms": None}, Condition.COMING),
    ],
)
def test_a_replica_counts_as_what_it_is(changes, expected):
    assert condition(**changes) is expected


def test_a_reason_is_for_a_person():
    told = judge(a_replica(busy=3, stalled_ms=90_000), now_ms=NOW_MS, rules=RULES)
    assert told.reason == "no step for 90 s with 3 requests"
    told = judge(a_replica(state=ReplicaState.DRAINING), now_ms=NOW_MS, rules=RULES)
    assert told.reason == "its worker drains"
    told = judge(a_replica(drain_deadline_ms=1, drain_reason="spot"), now_ms=NOW_MS, rules=RULES)
    assert told.reason == "spot"


@given(silent_ms=st.integers(0, 10**9))
def test_silence_alone_condemns_nobody_here(silent_ms):
    # Heartbeats lost for 30 s say nothing of the engine: the reaper asks before it believes.
    assert condition(silent_ms=silent_ms) is Condition.SERVING


@given(age_ms=st.integers(0, 10**9))
def test_one_that_wakes_is_not_held_to_the_age_of_its_process(age_ms):
    state, ready_ms = ReplicaState.WARMING, NOW_MS - age_ms
    changes = {"state": state, "ready_ms": ready_ms, "started_ms": ready_ms - 1}
    assert condition(**changes) is Condition.COMING
