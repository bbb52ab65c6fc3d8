"""Replicas that sleep beside those that serve: filled from behind, woken at once."""

import msgspec
import pytest

from control_plane.launchers.actions import Ask, Drain, Seen, Sleep, Wake, Wanted
from control_plane.launchers.life import Replica
from control_plane.launchers.plan import plan
from control_plane.scaler_signals import signals_of
from control_plane.scaling.signals import Phase
from core.fleet import ReplicaState
from core.worker_spec import LauncherKind
from store.pool_view import EMPTY
from store.scaling import ColdStarts, ReplicaFacts, Traffic
from tests.unit.control_plane.test_launch_plan import HOME, NOW_MS, RULES, a_launch, a_replica

QUIET = Traffic(
    arrived=0,
    arrived_prompt=0,
    ended=0,
    prompt=0,
    uncached=0,
    output=0,
    served_uncached=0,
    served_output=0,
    ttft_ms=None,
)


class World:
    """Launchers that do at once what they are told."""

    def __init__(self, ready: int) -> None:
        self.replicas = [a_replica(number) for number in range(ready)]

    def round(self, want: int, warm: int) -> list[type]:
        wanted = Wanted(deployment="smol-a", replicas=want, warm=warm, launcher=LauncherKind.LOCAL)
        launches = [a_launch(place) for place, _ in enumerate(self.replicas)]
        seen = Seen(replicas=tuple(self.replicas), launches=tuple(launches), home=HOME)
        actions = plan([wanted], seen, now_ms=NOW_MS, rules=RULES)
        for action in actions:
            match action:
                case Ask(replica_id=name):
                    self.replicas.append(a_replica(replica_id=name))
                case Sleep(replica_id=name):
                    self._become(name, ReplicaState.SLEEPING)
                case Wake(replica_id=name):
                    self._become(name, ReplicaState.READY)
        return [
            type(action) for action in actions if isinstance(action, Ask | Sleep | Wake | Drain)
        ]

    def count(self, state: ReplicaState) -> int:
        return sum(replica.state is state for replica in self.replicas)

    def _become(self, name: str, state: ReplicaState) -> None:
        self.replicas = [
            msgspec.structs.replace(one, state=state) if one.replica_id == name else one
            for one in self.replicas
        ]


@pytest.fixture
def world():
    world = World(1)
    assert world.round(1, 2) == [Ask, Ask]
    assert world.round(1, 2) == [Sleep, Sleep]
    assert world.round(1, 2) == []
    return world


def test_the_pool_is_filled_and_then_left_alone(world):
    assert (world.count(ReplicaState.READY), world.count(ReplicaState.SLEEPING)) == (1, 2)


def test_sleepers_are_woken_at_once_and_starts_come_behind(world):
    assert world.round(2, 2) == [Wake, Ask]
    assert world.round(2, 2) == [Sleep]
    assert (world.count(ReplicaState.READY), world.count(ReplicaState.SLEEPING)) == (2, 2)
    assert world.round(4, 0) == [Wake, Wake]


def test_what_is_not_wanted_any_more_fills_the_pool_before_it_is_stopped():
    world = World(4)
    first = world.round(1, 1)
    assert first.count(Sleep) == 1
    assert first.count(Drain) == 2


def test_a_smaller_pool_gives_back_what_it_holds(world):
    assert world.round(1, 1) == [Drain]
    assert world.round(1, 0) == [Drain, Drain]


def test_sleepers_that_others_start_are_left_to_them():
    wanted = Wanted(deployment="smol-a", replicas=1, launcher=LauncherKind.EXTERNAL)
    seen = Seen(replicas=(a_replica(0), a_replica(1, state=ReplicaState.SLEEPING)))
    assert plan([wanted], seen, now_ms=NOW_MS, rules=RULES) == []


def test_the_busiest_goes_on_serving():
    busy = a_replica(0, busy=3)
    idle = a_replica(1)
    wanted = Wanted(deployment="smol-a", replicas=1, warm=1, launcher=LauncherKind.EXTERNAL)
    seen = Seen(replicas=(busy, idle))
    actions = plan([wanted], seen, now_ms=NOW_MS, rules=RULES)
    assert [(type(one), one.replica_id) for one in actions] == [(Sleep, idle.replica_id)]
    assert isinstance(busy, Replica)


def test_those_that_come_to_sleep_are_not_taken_for_capacity():
    def facts(name, state, coming_ms):
        return ReplicaFacts(
            replica=name,
            state=state,
            coming_ms=coming_ms,
            silent_ms=None,
            kv_blocks=None,
            kv_blocks_free=None,
            running=None,
            sequences=None,
        )

    seen = signals_of(
        [facts("r1", "loading", 900), facts("r2", "loading", 100), facts("r3", "sleeping", 0)],
        EMPTY,
        QUIET,
        ColdStarts(took_ms=None, age_ms=None),
        window_ms=30_000,
        filling=1,
    )
    phases = {one.replica: one.phase for one in seen.replicas}
    assert phases == {"r1": Phase.COMING, "r2": Phase.FILLING, "r3": Phase.ASLEEP}
