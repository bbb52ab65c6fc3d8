"""The plan against a small world of processes: rounds are cut, processes die, wishes change.

Whatever happened before, when it stops happening there are as many replicas as are wanted; and
at no moment two processes for one id, nor a stream cut within its time.
"""

from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from control_plane.launchers import actions as act
from control_plane.launchers.life import LifeRules, Replica
from control_plane.launchers.plan import plan
from core.fleet import ReplicaState
from core.launch import Launch, Place
from core.worker_spec import LauncherKind

HOME = "abcdef"
LOAD_ROUNDS, STREAM_ROUNDS, ROUND_MS, LOST_MS = 2, 6, 100, 300
RULES = act.PlanRules(
    life=LifeRules(stalled_ms=1000, start_ms=2000),
    drain_ms=STREAM_ROUNDS * ROUND_MS * 2,
    places_max=6,
    retry_first_ms=100,
    retry_max_ms=400,
    stable_ms=1000,
)


@dataclass
class Process:
    born_ms: int
    age: int = 0
    streams: list[int] = field(default_factory=list)  # rounds that each still takes
    drain_ms: int | None = None
    hangs: bool = False


@dataclass
class World:
    now_ms: int = 1_000_000
    want: int = 1
    processes: dict[str, Process] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)
    rows: dict[str, Replica] = field(default_factory=dict)
    cut: int = 0  # streams that were ended within their time

    def round(self, *, upto: int | None = None) -> None:
        """One look, of which only so many actions happen; then everybody lives on."""
        seen = act.Seen(
            replicas=tuple(self.rows.values()),
            launches=tuple(self.launches.values()),
            places=tuple(Place(replica_id=name, alive=True) for name in self.processes),
            home=HOME,
        )
        wanted = act.Wanted(deployment="d", replicas=self.want, launcher=LauncherKind.LOCAL)
        for action in plan([wanted], seen, now_ms=self.now_ms, rules=RULES)[:upto]:
            self.do(action)
        self.live()

    def do(self, action: act.Action) -> None:  # noqa: C901 - flat: a case for each action
        name = action.replica_id
        launch = self.launches.get(name)
        match action:
            case act.Ask():
                assert launch is None, "an id is asked for once"
                self.launches[name] = Launch(
                    replica_id=name,
                    deployment="d",
                    launcher=LauncherKind.LOCAL,
                    home=HOME,
                    asked_ms=self.now_ms,
                )
            case act.Start():
                assert name not in self.processes, "two processes for one id"
                self.processes[name] = Process(born_ms=self.now_ms)
                self.note(name, started_ms=self.now_ms, retry_ms=None)
            case act.Adopt():
                self.note(name, started_ms=launch.retry_ms or launch.asked_ms)
            case act.Settle():
                self.note(name, failures=0)
            case act.Fail(retry_in_ms=pause_ms):
                failures = launch.failures + 1
                self.note(name, started_ms=None, failures=failures, retry_ms=self.now_ms + pause_ms)
            case act.Drain(within_ms=within_ms):
                if name in self.processes:
                    self.processes[name].drain_ms = self.now_ms + within_ms
                self.rows[name] = msgspec.structs.replace(
                    self.rows[name], drain_reason="x", drain_deadline_ms=self.now_ms + within_ms
                )
            case act.AskStop(reason=reason, grace_ms=grace_ms):
                self.note(
                    name, stop_reason=reason, stop_asked_ms=self.now_ms, stop_grace_ms=grace_ms
                )
            case act.Stop():
                self.end(name)
            case act.Forget():
                self.launches.pop(name, None)

    def note(self, name: str, **changes) -> None:
        self.launches[name] = msgspec.structs.replace(self.launches[name], **changes)

    def end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None and process.streams and not process.hangs:
            over = process.drain_ms is not None and self.now_ms >= process.drain_ms
            self.cut += 0 if over else len(process.streams)

    def live(self) -> None:
        self.now_ms += ROUND_MS
        for name, row in self.rows.items():
            silent_ms = row.silent_ms + ROUND_MS
            is_lost = silent_ms > LOST_MS and name not in self.processes  # as the reaper finds
            self.rows[name] = msgspec.structs.replace(
                row, silent_ms=silent_ms, state=ReplicaState.LOST if is_lost else row.state
            )
        for name, process in list(self.processes.items()):
            process.age += 1
            if not process.hangs:
                process.streams = [left - 1 for left in process.streams if left > 1]
            if process.drain_ms is not None and not process.streams:
                self.tell(name, process, ReplicaState.STOPPED)
                del self.processes[name]
            elif process.age > LOAD_ROUNDS:
                self.tell(name, process, ReplicaState.READY)
            else:
                self.tell(name, process, ReplicaState.LOADING)

    def tell(self, name: str, process: Process, state: ReplicaState) -> None:
        before = self.rows.get(name)
        same = before is not None and before.started_ms == process.born_ms
        stalled = before.stalled_ms + ROUND_MS if same and process.hangs else 0
        self.rows[name] = Replica(
            replica_id=name,
            deployment="d",
            state=state,
            busy=len(process.streams),
            stalled_ms=stalled if state is ReplicaState.READY else 0,
            started_ms=process.born_ms,
            drain_reason="x" if process.drain_ms else "",
            drain_deadline_ms=process.drain_ms,
        )


EVENTS = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 4)),
    st.tuples(st.just("cut"), st.integers(0, 2)),  # our process dies within its round
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("stream"), st.integers(0, 5)),
    st.tuples(st.just("forget"), st.integers(0, 5)),  # a start whose record was lost
    st.tuples(st.just("reclaim"), st.integers(0, 5)),
)


def happen(world: World, what: str, number: int) -> None:
    names = sorted(world.processes)
    name = names[number % len(names)] if names else ""
    match what:
        case "want":
            world.want = number
        case "cut":
            world.round(upto=number)
        case "kill" if name:
            del world.processes[name]
        case "hang" if name:
            world.processes[name].hangs = True
            world.processes[name].streams = [STREAM_ROUNDS]
        case "stream" if name and world.processes[name].age > LOAD_ROUNDS:
            if world.processes[name].drain_ms is None:
                world.processes[name].streams.append(STREAM_ROUNDS)
        case "forget" if name and name in world.launches:
            world.note(name, started_ms=None)
        case "reclaim" if name and world.processes[name].age > LOAD_ROUNDS:
            process = world.processes[name]
            within_ms = STREAM_ROUNDS * ROUND_MS
            process.drain_ms = process.drain_ms or world.now_ms + within_ms


@given(events=st.lists(EVENTS, max_size=30))
def test_whatever_happened_there_are_as_many_as_are_wanted_and_nothing_was_cut(events):
    world = World()
    for what, number in events:
        happen(world, what, number)
        world.round()
    for _ in range(80):
        world.round()
    serving = [
        row.replica_id
        for row in world.rows.values()
        if row.replica_id in world.processes and row.state is ReplicaState.READY
    ]
    assert sorted(serving) == sorted(world.processes) == sorted(world.launches)
    assert len(serving) == world.want
    assert world.cut == 0
    before = dict(world.processes)
    for _ in range(20):
        world.round()
    assert world.processes == before, "at rest nothing flaps"
